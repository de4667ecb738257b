"""Sources: what is found where, what each item becomes, and mistakes told before any work."""

from __future__ import annotations

import ast
import dataclasses
import gzip
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.config import ConfigError, SourceConfig
from pipeline.data import builtin, mathematics, sources
from pipeline.data.document import MAX_DOCUMENT_BYTES, Item
from pipeline.data.mathematics_problems import RESERVED_KINDS, TRAINED_KINDS
from tests.data.corpora import configuration, write_texts


def read(source: SourceConfig) -> list[tuple[int, Item]]:
    tasks = sources.read_tasks(configuration({"text": source}))
    return [item for task in tasks for item in sources.read_task(task)]


def files(uri: Path | str, **changes: str) -> SourceConfig:
    return SourceConfig(uris=(str(uri),), **changes)


def statuses(source: SourceConfig) -> list[str]:
    return [item.status for _, item in read(source)]


def test_each_text_file_is_a_document_and_what_is_none_is_said(tmp_path: Path) -> None:
    too_long = b"x" * (MAX_DOCUMENT_BYTES + 1)
    raws = ["one\n", "", " \n\t", b"\xff\xfe", "\ufeffmark", too_long, "d\r\nos"]
    items = read(files(write_texts(tmp_path, raws)))
    assert [item.status for _, item in items] == [
        *("document", "empty", "empty", "invalid_utf8", "document", "too_long", "document")
    ]
    assert [item.text for _, item in items if item.text] == ["one\n", "mark", "d\r\nos"]
    assert len({id_ for id_, _ in items}) == len(raws)


def test_a_byte_order_mark_costs_no_record(tmp_path: Path) -> None:
    lines = '\ufeff{"text": "one"}\n{"text": "\ufefftwo"}\n'
    source = files(write_texts(tmp_path, [lines], ending=".jsonl"), format="jsonl")
    assert [item.text for _, item in read(source)] == ["one", "\ufefftwo"]
    sources.check_sources(configuration({"text": source}))


def test_junk_in_json_lines_becomes_no_document(tmp_path: Path) -> None:
    lines = b'{"text": "one"}\n' + bytes(21) + b'\n\0\0{"text": "hello"}\n\xff{"text": "x"}\n'
    items = read(files(write_texts(tmp_path, [lines], ending=".jsonl"), format="jsonl"))
    assert [item.text for _, item in items if item.text] == ["one"]
    kinds = ["document", "malformed", "malformed", "invalid_utf8"]
    assert [item.status for _, item in items] == kinds


def test_links_are_the_files_that_they_name(tmp_path: Path) -> None:
    (real,) = write_texts(tmp_path / "real", ["0123456789"]).iterdir()
    (tmp_path / "view").mkdir()
    (tmp_path / "view" / "a.txt").symlink_to(real)
    for uri in ("view", "view/*.txt", "view/a.txt"):
        (before,) = sources.list_files(files(tmp_path / uri), "data.sources.text")
        assert before.size == 10
        real.write_text("9876543210")
        os.utime(real, (1e9, 1e9))
        (after,) = sources.list_files(files(tmp_path / uri), "data.sources.text")
        assert after.version != before.version
        os.utime(real, (2e9, 2e9))
    (tmp_path / "view" / "folder.txt").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match=r"folder\.txt is a link to a folder"):
        sources.list_files(files(tmp_path / "view"), "data.sources.text")


def test_each_hub_folder_has_a_training_split_of_its_own(tmp_path: Path) -> None:
    for name in ("a/train/x", "a/test/x", "b/data-0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": ["one"]}), tmp_path / f"{name}.parquet")
    both = SourceConfig(
        uris=(str(tmp_path / "a"), str(tmp_path / "b")), format="huggingface", text_column="text"
    )
    names = [Path(file.uri).name for file in sources.list_files(both, "data.sources.text")]
    assert names == ["x.parquet", "data-0.parquet"]


def test_a_filter_may_look_at_the_text_or_at_a_column_that_a_file_lacks(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x", "y"], "score": [1, 2]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"text": ["z"]}), tmp_path / "1.parquet")
    source = SourceConfig(uris=(str(tmp_path),), format="parquet", filters=("text != x",))
    assert [item.text for _, item in read(source) if item.text] == ["y", "z"]
    scored = dataclasses.replace(source, filters=("score >= 2",))
    assert [item.text for _, item in read(scored) if item.text] == ["y"]


@pytest.mark.parametrize("table", [{"other": ["x"]}, {"text": [1]}])
def test_a_later_file_that_does_not_fit_is_named(tmp_path: Path, table: dict) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table(table), tmp_path / "1.parquet")
    with pytest.raises(ConfigError, match=r"1\.parquet: cannot be read as parquet, column 'text'"):
        read(SourceConfig(uris=(str(tmp_path),), format="parquet"))


def test_an_empty_first_file_refuses_no_source(tmp_path: Path) -> None:
    source = files(
        write_texts(tmp_path, ["", '{"text": "one"}\n'], ending=".jsonl"), format="jsonl"
    )
    sources.check_sources(configuration({"text": source}))


def test_folders_globs_and_files_are_found_at_any_depth_once(tmp_path: Path) -> None:
    write_texts(tmp_path / "a" / "b", ["1", "2"])
    write_texts(tmp_path / "a", ["3"])
    write_texts(tmp_path / "a", ["hidden"], ending=".md")
    (tmp_path / "a" / ".hidden").write_text("x")
    for uri, number in [("a", 4), ("a/*.txt", 1), ("a/**/*.txt", 3), ("a/b/0001.txt", 1)]:
        found = sources.list_files(files(tmp_path / uri), "data.sources.text")
        assert len(found) == number, uri
    twice = SourceConfig(uris=(str(tmp_path / "a"), f"file://{tmp_path}/a/b"))
    assert len(sources.list_files(twice, "data.sources.text")) == 4


def test_remote_places_are_read_through_fsspec(tmp_path: Path) -> None:
    remote = fsspec.filesystem("memory")
    remote.pipe("/corpus/one.jsonl", b'{"text": "far away"}\n')
    items = read(files("memory://corpus", format="jsonl"))
    assert [item.text for _, item in items] == ["far away"]


LINES = b"\n".join(
    [
        json.dumps({"text": "first", "more": 1}).encode(),
        b"not json",
        b'{"other": "column"}',
        b'{"text": null}',
        b'{"text": 5}',
        b"[]",
        b'{"text": "\xff"}',
        b"",
        json.dumps({"text": "\ud800"}).encode(),
        json.dumps({"text": "last\u00e9"}, ensure_ascii=False).encode(),
    ]
)


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_json_lines_plain_or_compressed(tmp_path: Path, ending: str) -> None:
    packed = {
        ".jsonl": LINES,
        ".jsonl.gz": gzip.compress(LINES),
        ".jsonl.zst": pa.compress(LINES, codec="zstd", asbytes=True),
    }
    (tmp_path / f"corpus{ending}").write_bytes(packed[ending])
    assert statuses(files(tmp_path, format="jsonl")) == [
        *("document", "malformed", "malformed", "empty", "malformed", "malformed"),
        *("invalid_utf8", "empty", "invalid_utf8", "document"),
    ]


def test_a_column_of_parquet_files(tmp_path: Path) -> None:
    for i, kind in enumerate([pa.string(), pa.large_string(), pa.binary()]):
        values = [b"one", b"", None, b"four"] if kind == pa.binary() else ["one", "", None, "four"]
        table = pa.table({"body": pa.array(values, kind), "id": [1, 2, 3, 4]})
        pq.write_table(table, tmp_path / f"{i}.parquet")
    found = statuses(files(tmp_path, format="parquet", text_column="body"))
    assert found == ["document", "empty", "empty", "document"] * 3


RECORDS = [
    {"text": "kept because it is good", "score": 4, "language": "en"},
    {"text": "dropped: the score", "score": 2.5, "language": "en"},
    {"text": "dropped: the language", "score": 4, "language": "de"},
    {"text": "short", "score": 4, "language": "en"},
    {"text": "far too long " * 9, "score": 4, "language": "en"},
    {"text": "dropped: no score", "score": None, "language": "en"},
]


@pytest.mark.parametrize("format", ["jsonl", "parquet", "huggingface"])
def test_filters_leave_out_by_length_and_by_other_columns(tmp_path: Path, format: str) -> None:
    if format == "jsonl":
        write_texts(tmp_path, ["".join(json.dumps(r) + "\n" for r in RECORDS)], ending=".jsonl")
    else:
        pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "x.parquet")
    filters = ("score >= 3", "language == en")
    source = SourceConfig(
        uris=(str(tmp_path),), format=format, filters=filters, min_chars=10, max_chars=100
    )
    sources.check_sources(configuration({"text": source}))
    assert statuses(source) == ["document", *["filtered"] * 5]


def test_lengths_filter_builtin_sources_too() -> None:
    source = SourceConfig(builtin="mathematics", max_bytes=20_000, min_chars=10**6)
    assert set(statuses(source)) == {"filtered"}


def save_to_disk(folder: Path, values: list[str]) -> None:
    """A folder as `datasets.Dataset.save_to_disk` leaves it."""
    folder.mkdir(parents=True)
    table = pa.table({"text": values})
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as out:
        out.write_table(table, max_chunksize=2)
    (folder / "cache-0a0b.arrow").write_bytes(b"of another shape")
    (folder / "state.json").write_text("{}")


def test_a_saved_hugging_face_dataset_is_read_and_only_its_training_split(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "alone", ["one", "", "three"])
    assert statuses(files(tmp_path / "alone", format="huggingface")) == [
        *("document", "empty", "document")
    ]
    for split in ("train", "test"):
        save_to_disk(tmp_path / "several" / split, [split])
    items = read(files(tmp_path / "several", format="huggingface"))
    assert [item.text for _, item in items] == ["train"]


@pytest.mark.slow
def test_what_datasets_saves_is_what_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [f"document {i}" for i in range(50)]
    whole = datasets.Dataset.from_dict({"text": texts, "n": list(range(50))})
    whole.filter(lambda row: row["n"] % 2 == 0).save_to_disk(str(tmp_path / "saved"), num_shards=3)
    items = read(files(tmp_path / "saved", format="huggingface"))
    assert [item.text for _, item in items] == texts[::2]


class Hub(MemoryFileSystem):
    """Stands for the hub's file system: hf:// addresses, blob ids as versions."""

    protocol = "hf"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    blob = "first"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("hf://").strip("/")

    def find(self, path: str, detail: bool = False, **kwargs: object) -> dict:
        found = super().find(path, detail=True, **kwargs)
        return {name: {**entry, "blob_id": self.blob} for name, entry in found.items()}


def test_the_hub_is_read_by_address_or_by_a_datasets_name() -> None:
    fsspec.register_implementation("hf", Hub, clobber=True)
    hub = fsspec.filesystem("hf")
    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["from the hub"]}), table)
    for split in ("train", "validation"):
        place = f"datasets/owner/name@refs/convert/parquet/default/{split}/0000.parquet"
        hub.pipe(f"/{place}", table.getvalue())
    by_name = files("owner/name", format="huggingface")
    assert [item.text for _, item in read(by_name)] == ["from the hub"]
    address = "hf://datasets/owner/name@refs/convert/parquet/default/validation"
    by_address = files(address, format="parquet")
    assert [item.text for _, item in read(by_address)] == ["from the hub"]
    (file,) = sources.list_files(by_address, "key")
    assert file.uri.startswith("hf://")
    assert file.version == "first"


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES * 50)[:-20])
    with pytest.raises(ConfigError, match=r"b\.jsonl\.gz: cannot be read as jsonl, column 'text'"):
        read(files(tmp_path, format="jsonl"))


def test_columns_are_found_behind_lines_that_are_no_records(tmp_path: Path) -> None:
    lines = b'\n[1]\n{"text": "\xff"}\n{"text": "x"}\n'
    folder = write_texts(tmp_path / "[raw] text", [lines], ending=".jsonl")
    source = SourceConfig(uris=(str(folder),), format="jsonl")
    sources.check_sources(configuration({"mine": source}))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            SourceConfig(uris=("{folder}/none",)),
            r"sources\.mine\.uris: no text file .* {folder}/no",
        ),
        (SourceConfig(uris=("{folder}/empty",)), r"sources\.mine\.uris: no text file"),
        (SourceConfig(uris=("{folder}/blank",)), "with anything in it"),
        (SourceConfig(uris=("{folder}/*.md",)), r"no text file .* {folder}/\*\.md"),
        (SourceConfig(uris=("{folder}/json",), format="parquet"), r"no parquet file \(\*\.parquet"),
        (SourceConfig(uris=("{folder}/json",), format="json"), "did you mean jsonl"),
        (
            SourceConfig(uris=("{folder}/json",), format="jsonl", text_column="body"),
            r"text_column: {folder}/json/0000\.jsonl has no 'body'; it has text, id",
        ),
        (SourceConfig(uris=("{folder}/bad",), format="jsonl"), r"bad/0000\.jsonl is no jsonl file"),
        (SourceConfig(uris=("nosuch://bucket/x",)), "cannot read nosuch://bucket/x"),
        (SourceConfig(builtin="pyton"), "did you mean python"),
        (
            SourceConfig(uris=("{folder}/json",), format="jsonl", filters=("id ~ 3",)),
            r"sources\.mine\.filters: 'id ~ 3' is no filter; write column, comparison",
        ),
        (
            SourceConfig(uris=("{folder}/table",), format="parquet", filters=("score > 3",)),
            r"mine\.filters: {folder}/table/0\.parquet has no 'score'; it has text",
        ),
        (SourceConfig(builtin="python", filters=("a > 1",)), "builtin source has no columns"),
        (SourceConfig(uris=("{folder}/list",), format="jsonl"), "first 100 lines is a JSON object"),
        (
            SourceConfig(uris=("{folder}/table",), format="parquet", text_column="number"),
            r"text_column: {folder}/table/0\.parquet has int64 under 'number', and no text",
        ),
        (SourceConfig(uris=("{folder}/link",)), "{folder}/link/a.txt is a link to a file"),
        (SourceConfig(uris=("{folder}/json/0000.jsonl",), filters=("a > 1",)), "have no columns"),
    ],
)
def test_a_mistake_is_told_before_any_work(
    tmp_path: Path, source: SourceConfig, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    write_texts(tmp_path / "blank", [""])
    write_texts(tmp_path / "json", ['{"text": "x", "id": 1}\n'], ending=".jsonl")
    write_texts(tmp_path / "bad", ["no json\n"], ending=".jsonl")
    (tmp_path / "table").mkdir()
    pq.write_table(pa.table({"text": ["x"], "number": [1]}), tmp_path / "table" / "0.parquet")
    write_texts(tmp_path / "list", ["[1, 2]\n" + "[" * 100_000 + "\n\n3\n"], ending=".jsonl")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "a.txt").symlink_to(tmp_path / "nowhere")
    uris = tuple(uri.replace("{folder}", str(tmp_path)) for uri in source.uris)
    config = configuration({"mine": SourceConfig(**{**vars(source), "uris": uris})})
    with pytest.raises(ConfigError, match=message.replace("{folder}", re.escape(str(tmp_path)))):
        sources.check_sources(config)


def test_a_name_that_cannot_be_a_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        sources.check_sources(configuration({"a/b": SourceConfig(builtin="python")}))


def test_identity_changes_with_the_files(tmp_path: Path) -> None:
    config = configuration({"text": files(write_texts(tmp_path, ["one", "two"]))})
    before = sources.identity(config)
    assert sources.identity(config) == before
    (tmp_path / "0001.txt").write_text("three")
    assert sources.identity(config) != before


def test_code_is_the_librarys_without_tests_and_docstrings() -> None:
    names = builtin.library_files()
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name or "/test" in name for name in names)
    source = (builtin.library_folder() / "textwrap.py").read_text()
    code = builtin.code_document("textwrap.py").text
    assert ast.get_docstring(ast.parse(source))
    trees = ast.parse(source), ast.parse(code)
    names_in = [[node.id for node in ast.walk(t) if isinstance(node, ast.Name)] for t in trees]
    assert names_in[0] == names_in[1]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    assert not any(
        ast.get_docstring(node) for node in ast.walk(trees[1]) if isinstance(node, documented)
    )


def test_cutting_docstrings_leaves_code_that_parses_even_where_they_are_all_of_it() -> None:
    for name in builtin.library_files()[::40]:
        item = builtin.code_document(name)
        if item.text:
            ast.parse(item.text)
    cut = builtin._without_docstrings
    paged = 'x = 1\n\x0c\ndef f():\n    """first\x85\u2028line\n    second"""\n    return 2\r\n'
    assert cut(paged, ast.parse(paged)) == "x = 1\n\x0c\ndef f():\n    return 2\r\n"
    alone = 'class A:\n    """only"""\n\ndef f(): "here"\n\nclass B:\n    """a"""; x = 1\n'
    assert cut(alone, ast.parse(alone)) == alone.replace('    """only"""', "    ...")


def test_prose_is_parsed_from_sources_and_imports_none_of_them() -> None:
    before = set(sys.modules)
    (module,) = builtin.prose_documents("this.py")
    assert module.status == "empty"  # it prints when imported, and documents nothing
    (text,) = builtin.prose_documents("textwrap.py")
    assert text.text.startswith("textwrap.TextWrapper\n\nObject for wrapping/filling text.")
    assert "textwrap.dedent\n\nRemove any common leading whitespace" in text.text
    topics = list(builtin.prose_documents("pydoc_data/topics.py"))
    assert len(topics) > 50
    assert set(sys.modules) - before <= {"textwrap"}


def test_a_worksheet_is_a_pure_function_of_seed_and_index() -> None:
    sheets = [mathematics.worksheet(0, i) for i in range(200)]
    assert [mathematics.worksheet(0, i) for i in reversed(range(200))] == sheets[::-1]
    assert len({sheet.text for sheet in sheets}) == 200
    assert mathematics.worksheet(1, 0) != sheets[0]


def test_reserved_kinds_appear_in_reserved_worksheets_only() -> None:
    reserved_titles = {kind.title for kind in RESERVED_KINDS}
    assert not reserved_titles & {kind.title for kind in TRAINED_KINDS}
    seen: dict[bool, set[str]] = {True: set(), False: set()}
    for i in range(2_000):
        sheet = mathematics.worksheet(0, i)
        seen[sheet.reserved].add(sheet.text.split("\n")[0])
    assert seen[True] == reserved_titles
    assert seen[False] == {kind.title for kind in TRAINED_KINDS}


def test_enough_worksheets_are_made_for_the_bytes_asked() -> None:
    total = mathematics.num_worksheets(300_000, 0.02)
    sheets = [mathematics.worksheet(5, i) for i in range(total)]
    size = sum(len(sheet.text.encode()) for sheet in sheets if not sheet.reserved)
    assert 300_000 / 0.98 < size < 450_000


EQUATION = re.compile(r"(?<![\w/.])(-?\d+(?: [-+x/] \d+)+) = (-?\d+)(?!\w|\.\d|/| [-+x/])")


def test_the_worked_steps_are_right() -> None:
    """Every plain equation on 2000 worksheets holds."""
    checked = 0
    for i in range(2_000):
        for left, right in EQUATION.findall(mathematics.worksheet(0, i).text):
            value = eval(left.replace(" x ", " * "))
            assert value == int(right), f"{left} = {right}"
            checked += 1
    assert checked > 5_000
