"""Preparing a corpus with Ray Data: the same sources give the same corpus, whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.config import ConfigError, DataConfig, SourceConfig, TokenizerConfig
from pipeline.data import build, ray_jobs, sources
from pipeline.data.prepare import prepare, prepared_folder
from pipeline.data.shards import DataError, Dataset, verify
from pipeline.data.tokenizer import load_tokenizer
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


def test_an_interrupted_preparation_goes_on_and_gives_the_same(
    corpus: DataConfig, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt_at(word: str) -> None:
        def progress(line: str) -> None:
            if word in line:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare(corpus, tmp_path, progress=progress)

    interrupt_at("tokenizing")
    folder = prepared_folder(corpus, tmp_path)
    assert not folder.exists()
    with monkeypatch.context() as patch:
        patch.setattr(build, "write_holdout", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(corpus, tmp_path, progress=print)
    work = folder.parent / f".{folder.name}"
    before = {path.name: path.stat().st_mtime_ns for path in work.glob("*.tokens")}
    assert len(before) > 5
    said: list[str] = []
    finished = Dataset.open(prepare(corpus, tmp_path, progress=said.append))
    assert "interrupted" in said[0]
    assert finished.bos_id is None
    assert finished.content_hash == dataset.content_hash
    assert finished.manifest["made_by"]["parts_read"] == 0
    assert {name: (finished.folder / name).stat().st_mtime_ns for name in before} == before
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, ".index"}
    assert not {"parts", "text"} & {path.name for path in finished.folder.iterdir()}


def test_a_file_that_a_dead_process_half_wrote_is_taken_for_nothing(
    small: DataConfig, tmp_path: Path, ray_session: None
) -> None:
    folder = prepared_folder(small, tmp_path)
    parts = folder.parent / f".{folder.name}" / "parts"
    parts.mkdir(parents=True)
    (parts / ".half.tokens.0a0b").write_bytes(b"\0" * 10)
    whole = prepare(small, tmp_path, progress=print)
    verify(Dataset.open(whole), deep=True)


def test_two_at_once_do_the_work_once(
    small: DataConfig, tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, calls = threading.Event(), []

    def slow(_data: DataConfig, work: Path, *_: object) -> None:
        calls.append(work)
        begun.set()
        time.sleep(0.3)
        shutil.copytree(dataset.folder, work, dirs_exist_ok=True)

    monkeypatch.setattr(build, "build", slow)
    first = threading.Thread(target=prepare, args=(small, tmp_path))
    first.start()
    begun.wait()
    said: list[str] = []
    folder = prepare(small, tmp_path, progress=said.append)
    first.join()
    assert len(calls) == 1
    assert "waiting" in said[0]
    assert "another process" in said[1]
    assert list(folder.parent.iterdir()) == [folder]


@pytest.fixture(scope="module")
def with_tokenizer(corpus: DataConfig, dataset: Dataset) -> DataConfig:
    return dataclasses.replace(corpus, tokenizer=TokenizerConfig(path=str(dataset.tokenizer_path)))


def test_adding_a_source_reads_it_alone_and_links_the_shards_of_the_others(
    with_tokenizer: DataConfig, tmp_path: Path, ray_session: None
) -> None:
    before = Dataset.open(prepare(with_tokenizer, tmp_path, progress=print))
    added = SourceConfig(uris=(str(write_texts(tmp_path / "c", sentences(40, "cherry"))),))
    more = dataclasses.replace(with_tokenizer, sources={**with_tokenizer.sources, "c": added})
    after = Dataset.open(prepare(more, tmp_path, progress=print))
    assert after.manifest["made_by"]["parts_read"] == 1
    assert set(after.sources) - set(before.sources) == {"c"}
    for name in before.sources:
        assert after.manifest["sources"][name] == before.manifest["sources"][name]
    for name in before.shard_names:
        assert (before.folder / name).stat().st_ino == (after.folder / name).stat().st_ino
    verify(after, deep=True)


def test_a_damaged_shard_is_not_linked_but_made_again(
    with_tokenizer: DataConfig, tmp_path: Path, ray_session: None
) -> None:
    before = Dataset.open(prepare(with_tokenizer, tmp_path, progress=print))
    shard = before.folder / min(before.shard_names)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    added = SourceConfig(uris=(str(write_texts(tmp_path / "c", sentences(40, "cherry"))),))
    more = dataclasses.replace(with_tokenizer, sources={**with_tokenizer.sources, "c": added})
    verify(Dataset.open(prepare(more, tmp_path, progress=print)), deep=True)


def test_what_is_linked_equals_what_would_be_made(
    with_tokenizer: DataConfig, tmp_path: Path, ray_session: None
) -> None:
    fewer = dataclasses.replace(with_tokenizer, sources={"a": with_tokenizer.sources["a"]})
    prepare(fewer, tmp_path / "linked", progress=print)
    said: list[str] = []
    linked = prepare(with_tokenizer, tmp_path / "linked", progress=said.append)
    fresh = prepare(with_tokenizer, tmp_path / "fresh", progress=print)
    assert any("a is as in" in line for line in said)
    assert Dataset.open(linked).content_hash == Dataset.open(fresh).content_hash


def test_a_disk_that_fills_up_is_named_and_loses_nothing(
    small: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        ray_jobs.run_tasks(full, [0])
    assert caught.value.errno == errno.ENOSPC
    with monkeypatch.context() as patch:
        patch.setattr(build, "write_holdout", lambda *_: full(0))
        with pytest.raises(ConfigError, match=r"root: the disk at / ?.*is full .*same command"):
            prepare(small, tmp_path, progress=print)
    assert prepare(small, tmp_path, progress=print).is_dir()


def everything(folder: Path) -> DataConfig:
    """Filters, decontamination, a beginning of documents and best-fit rows at once."""
    question = " ".join(f"Why, {word}?" for word in "abcdefg")
    (folder / "exam.json").write_text(json.dumps([{"question": {"stem": question}, "key": "A"}]))
    texts = [*sentences(80, "apple"), f"so {question.lower().replace('?', '')} he said", "tiny", ""]
    texts.append(" ".join(sentences(12, "long")))
    lines = [json.dumps({"text": text, "score": (i + 1) % 5}) for i, text in enumerate(texts)]
    write_texts(folder / "a", ["\n".join(lines[i::6]) + "\n" for i in range(6)], ending=".jsonl")
    write_texts(folder / "b", sentences(30, "banana"))
    return configuration(
        {
            "a": SourceConfig(
                uris=(str(folder / "a"),), format="jsonl", min_chars=10, filters=("score >= 1",)
            ),
            "b": SourceConfig(uris=(str(folder / "b"),)),
        },
        tokenizer=TokenizerConfig(400, bos_token="<|begin|>", training_bytes=20_000),
        decontaminate=(str(folder / "exam.json"),),
        packing="best_fit",
        row_length=256,
    )


def test_with_all_that_can_be_configured_the_content_hash_depends_on_no_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    config = everything(tmp_path)
    found = Dataset.open(prepare(config, tmp_path / "one", progress=print))
    monkeypatch.setattr(sources, "_TASK_BYTES", 100)
    monkeypatch.setattr(ray_jobs, "_BATCH_BYTES", 200)
    monkeypatch.setattr(ray_jobs, "_at_a_time", lambda _: 1)
    said: list[str] = []
    again = Dataset.open(prepare(config, tmp_path / "two", progress=said.append))
    assert again.content_hash == found.content_hash
    counts = found.manifest["sources"]["a"]["counts"]
    assert (counts["contaminated"], counts["filtered"], counts["empty"]) == (1, 16 + 1, 1)
    tokens = found.read("a", 0, found.num_tokens("a"))
    bos = load_tokenizer(found.tokenizer_path).token_to_id("<|begin|>")
    assert found.bos_id == bos is not None
    assert found.num_tokens("a") == found.num_units("a", 256) * 256 + 1
    starts = np.flatnonzero(tokens == bos)
    assert len(starts) == found.manifest["sources"]["a"]["documents"]
    ends = np.array([np.flatnonzero(tokens[start:] == found.eos_id)[0] for start in starts])
    assert (tokens[starts[1:] - 1] == found.eos_id).all()
    cut = (starts // 256 != (starts + ends) // 256) & (ends < 256)
    assert not cut.any()
    header = next(line for line in said if "contaminated" in line)
    row = next(line for line in said if line.startswith("data: a "))
    assert header.split()[2:4] == ["documents", "bytes"]
    assert row.split()[2] == f"{len(starts):,}"


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
    assert not prepared_folder(corpus, tmp_path).exists()


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
