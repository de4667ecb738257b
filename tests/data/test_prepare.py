"""Preparing a corpus with Ray Data: the same sources give the same corpus, whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.config import ConfigError, DataConfig, SourceConfig, TokenizerConfig
from pipeline.data import build, sources
from pipeline.data.prepare import prepare, prepared_folder
from pipeline.data.shards import DataError, Dataset, verify
from tests.data.corpora import configuration, sentences, write_texts

pytestmark = pytest.mark.slow

EOS = "<|endoftext|>"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Two sources with copies, an empty and a broken file, and one that speaks of EOS."""
    folder = tmp_path_factory.mktemp("texts")
    a, b = sentences(60, "apple"), sentences(40, "banana")
    write_texts(folder / "a", [*a, a[3], "", b"\xff\xff", f"about {EOS} and more {EOS}\n"])
    lines = "".join(json.dumps({"text": text}) + "\n" for text in [*b, a[0], b[5]])
    write_texts(folder / "b", [lines], ending=".jsonl")
    return configuration(
        {
            "a": SourceConfig(uris=(str(folder / "a"),)),
            "b": SourceConfig(uris=(str(folder / "b"),), format="jsonl"),
            "mathematics": SourceConfig(builtin="mathematics", max_bytes=30_000),
        }
    )


@pytest.fixture(scope="module")
def dataset(
    corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory, ray_session: None
) -> Dataset:
    return Dataset.open(prepare(corpus, tmp_path_factory.mktemp("root"), progress=print))


def documents(dataset: Dataset, source: str) -> list[str]:
    """The training documents of a source, decoded."""
    tokenizer = Tokenizer.from_file(str(dataset.tokenizer_path))
    tokens = dataset.read(source, 0, dataset.num_tokens(source))
    ends = np.flatnonzero(tokens == dataset.eos_id)
    assert ends[-1] == len(tokens) - 1
    return [
        tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False)
        for part in np.split(tokens, ends[:-1] + 1)
    ]


def held_out(dataset: Dataset, source: str, reserved: bool) -> list[str]:
    entries = dataset.holdout_documents(source)
    return [entry["text"] for entry in entries if entry["reserved"] == reserved]


def test_text_survives_and_each_document_ends_with_its_only_eos(dataset: Dataset) -> None:
    found = [*documents(dataset, "a"), *held_out(dataset, "a", reserved=False)]
    expected = [*sentences(60, "apple"), f"about {EOS} and more {EOS}\n"]
    assert sorted(found) == sorted(expected)
    assert dataset.manifest["sources"]["a"]["documents"] == len(documents(dataset, "a"))


def test_documents_stand_in_the_order_of_their_hashes_and_the_lowest_are_held_out(
    dataset: Dataset,
) -> None:
    for source in dataset.sources:
        found = [*held_out(dataset, source, reserved=False), *documents(dataset, source)]
        hashes = [hashlib.sha256(text.encode()).digest() for text in found]
        assert hashes == sorted(hashes)
        limit = int(0.1 * 2**64).to_bytes(8)
        number = len(held_out(dataset, source, reserved=False))
        assert hashes[number - 1] < limit <= hashes[number]


def test_copies_are_dropped_within_and_between_sources(dataset: Dataset) -> None:
    found = [*documents(dataset, "b"), *held_out(dataset, "b", reserved=False)]
    assert sorted(found) == sorted(sentences(40, "banana"))
    counts = {name: entry["counts"] for name, entry in dataset.manifest["sources"].items()}
    assert (counts["a"]["duplicate"], counts["b"]["duplicate"]) == (1, 2)
    assert (counts["a"]["read"], counts["a"]["empty"], counts["a"]["invalid_utf8"]) == (64, 1, 1)


def test_no_held_out_or_reserved_document_is_trained_on(dataset: Dataset) -> None:
    for source in dataset.sources:
        training = set(documents(dataset, source))
        assert held_out(dataset, source, reserved=False)
        assert not training & {entry["text"] for entry in dataset.holdout_documents(source)}


def test_reserved_kinds_of_problems_are_held_out_whole(dataset: Dataset) -> None:
    reserved = held_out(dataset, "mathematics", reserved=True)
    titles = {text.split("\n")[0] for text in reserved}
    assert reserved
    others = [*documents(dataset, "mathematics"), *held_out(dataset, "mathematics", reserved=False)]
    assert not titles & {text.split("\n")[0] for text in others}


def test_the_held_out_stream_holds_the_held_out_documents_in_order(dataset: Dataset) -> None:
    tokenizer = Tokenizer.from_file(str(dataset.tokenizer_path))
    for source in dataset.sources:
        tokens = dataset.holdout(source)
        parts = np.split(tokens, np.flatnonzero(tokens == dataset.eos_id)[:-1] + 1)
        texts = [tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts]
        assert texts == held_out(dataset, source, reserved=False)


def test_token_bytes_add_up_to_the_text(dataset: Dataset) -> None:
    lengths = dataset.token_bytes()
    for source, entry in dataset.manifest["sources"].items():
        tokens = dataset.read(source, 0, dataset.num_tokens(source))
        assert lengths[tokens].sum() == entry["bytes"]
        assert entry["tokens"] == len(tokens)


def test_shards_stay_near_their_size_and_verify(dataset: Dataset) -> None:
    verify(dataset, deep=True)
    shards = dataset.manifest["sources"]["mathematics"]["shards"]
    assert len(shards) > 3
    assert all(shard["tokens"] <= 2_000 for shard in shards)
    assert {path.name for path in dataset.folder.iterdir()} >= {"manifest.json", "holdout"}
    assert not (dataset.folder / "parts").exists()


@pytest.mark.parametrize("task_bytes", [300, 10**9])
def test_the_content_hash_does_not_depend_on_rays_blocks(
    corpus: DataConfig,
    dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task_bytes: int,
) -> None:
    monkeypatch.setattr(sources, "_TASK_BYTES", task_bytes)
    monkeypatch.setattr(sources, "_BUILTIN_TASKS", 3)
    again = Dataset.open(prepare(corpus, tmp_path, progress=print))
    assert again.content_hash == dataset.content_hash
    assert again.manifest["made_by"] != dataset.manifest["made_by"]


def test_an_unchanged_corpus_is_found_without_reading_or_ray(
    corpus: DataConfig, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "build", lambda *_: pytest.fail("built again"))
    said: list[str] = []
    root = dataset.folder.parent.parent
    assert prepare(corpus, root, progress=said.append) == dataset.folder
    assert "is up to date" in said[0]
    other_order = dataclasses.replace(corpus, mixture_block=64, executor="ray")
    assert prepared_folder(other_order, root) == dataset.folder


def test_a_changed_input_or_configuration_has_another_folder(
    corpus: DataConfig, tmp_path: Path
) -> None:
    shutil.copytree(corpus.sources["a"].uris[0], tmp_path / "a")
    here = dataclasses.replace(corpus, sources={"a": SourceConfig(uris=(str(tmp_path / "a"),))})
    folders = [prepared_folder(here, tmp_path)]
    (tmp_path / "a" / "0000.txt").write_text("another beginning")
    folders.append(prepared_folder(here, tmp_path))
    for changes in ({"holdout_fraction": 0.2}, {"seed": 1}, {"tokenizer": TokenizerConfig(300)}):
        folders.append(prepared_folder(dataclasses.replace(here, **changes), tmp_path))
    assert len(set(folders)) == 5


@pytest.fixture
def small(tmp_path: Path) -> DataConfig:
    return configuration({"a": SourceConfig(uris=(str(write_texts(tmp_path / "a", ["x" * 9])),))})


def test_an_interrupted_preparation_leaves_nothing_behind(
    small: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_data: DataConfig, folder: Path, *_: object) -> None:
        (folder / "manifest.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(small, tmp_path)
    assert list((tmp_path / "data").iterdir()) == []


def test_what_a_killed_preparation_left_is_taken_for_nothing_and_removed(
    small: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepared_folder(small, tmp_path)
    host = os.uname().nodename
    dead = folder.parent / f".{folder.name}.{host}-{2**22 + 1}-0a0a"  # above the largest pid
    alive = folder.parent / f".{folder.name}.{host}-{os.getpid()}-0b0b"
    for path in (dead, alive):
        path.mkdir(parents=True)
    seen: list[set[Path]] = []
    monkeypatch.setattr(build, "build", lambda *_: seen.append(set(folder.parent.iterdir())))
    prepare(small, tmp_path)
    assert dead not in seen[0]
    assert alive in seen[0]


def test_two_at_once_do_not_disturb_each_other(
    small: DataConfig, tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepared_folder(small, tmp_path)

    def slower(_data: DataConfig, mine: Path, *_: object) -> None:
        shutil.copytree(dataset.folder, folder)  # the other one ends first
        shutil.copytree(dataset.folder, mine, dirs_exist_ok=True)

    monkeypatch.setattr(build, "build", slower)
    said: list[str] = []
    assert prepare(small, tmp_path, progress=said.append) == folder
    assert "another process" in said[0]
    verify(Dataset.open(folder), deep=True)
    assert list(folder.parent.iterdir()) == [folder]


def test_a_damaged_corpus_is_not_reused(
    dataset: Dataset, tmp_path: Path, small: DataConfig
) -> None:
    folder = prepared_folder(small, tmp_path)
    shutil.copytree(dataset.folder, folder)
    (folder / "b-00000.tokens").unlink()
    with pytest.raises(DataError, match=r"b-00000\.tokens: missing; delete the folder and run"):
        prepare(small, tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_root_without_permission_is_one_clear_line(small: DataConfig, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match=r"cannot write in .*Permission denied"):
        prepare(small, root)


def test_a_root_that_is_a_file_is_one_clear_line(small: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"root: cannot write in .*; choose another root"):
        prepare(small, tmp_path / "file")


def test_a_full_disk_is_told_before_writing(
    corpus: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3_000_000))
    with pytest.raises(ConfigError, match=r"needs about 17 MB, and .* has 3 MB free"):
        prepare(corpus, tmp_path, progress=print)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_mistake_found_while_reading_is_one_clear_line(tmp_path: Path, ray_session: None) -> None:
    write_texts(tmp_path / "a", ['{"text": "fine"}\n', "\x1f\x8bnot gzip"], ending=".jsonl")
    (tmp_path / "a" / "0001.jsonl").rename(tmp_path / "a" / "0001.jsonl.gz")
    config = configuration({"a": SourceConfig(uris=(str(tmp_path / "a"),), format="jsonl")})
    with pytest.raises(
        ConfigError, match=r"^[^\n]*0001\.jsonl\.gz: cannot be read as jsonl[^\n]*$"
    ):
        prepare(config, tmp_path, progress=print)


def test_a_source_without_a_document_left_is_refused(tmp_path: Path, ray_session: None) -> None:
    uri = str(write_texts(tmp_path / "a", [" \n", b"\xff"]))
    with pytest.raises(ConfigError, match=r"no document is left .*empty 1, invalid_utf8 1"):
        prepare(configuration({"a": SourceConfig(uris=(uri,))}), tmp_path, progress=print)


def test_a_given_tokenizer_is_used_as_it_is(
    corpus: DataConfig, dataset: Dataset, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    content = json.loads(dataset.tokenizer_path.read_text())
    path.write_text(json.dumps(content, indent=3))
    config = dataclasses.replace(
        corpus,
        tokenizer=TokenizerConfig(path=str(path)),
        sources={"b": corpus.sources["b"]},
    )
    found = Dataset.open(prepare(config, tmp_path, progress=print))
    assert found.tokenizer_path.read_bytes() == path.read_bytes()
    assert (found.vocab_size, found.eos_id) == (dataset.vocab_size, 0)


def test_an_unknown_executor_is_refused(small: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.executor: no 'map'; did you mean mmap"):
        prepare(dataclasses.replace(small, executor="map"), tmp_path)


def test_preparing_needs_a_tokenizer_that_can_be(small: DataConfig, tmp_path: Path) -> None:
    for tokenizer, message in [
        (TokenizerConfig(vocab_size=256), "needs 257"),
        (TokenizerConfig(path=str(tmp_path / "no.json")), r"no file .*no\.json"),
    ]:
        with pytest.raises(ConfigError, match=message):
            prepare(dataclasses.replace(small, tokenizer=tokenizer), tmp_path)
