"""Plain text out of documentation formats: HTML, dictd dictionaries, Metamath, Sphinx and POD.

Each reader takes a file and yields the texts of its documents. They are meant for well-formed
documentation, not for the web.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_DROPPED = {"script", "style", "head", "header", "footer", "nav", "aside", "button", "noscript"}
_VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
_LINES = {"br", "dd", "div", "dt", "hr", "li", "ol", "td", "th", "tr", "ul"}  # begin a line
_PARAGRAPHS = {"blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "p", "pre", "section", "table"}
_NAVIGATION = re.compile(r"\b(navheader|navfooter|toc|sphinxsidebar|related|headerlink)\b")
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"  # of a dictd index
_SECTION = re.compile(r"^(?=\$\(\n+(?:####|#\*#\*|=-=-|-\.-\.))", re.MULTILINE)


def plain(path: Path) -> Iterator[str]:
    """The file as it is."""
    yield path.read_text(encoding="utf-8", errors="strict")


def html(path: Path) -> Iterator[str]:
    """What a page says: no scripts, navigation or markup; paragraphs apart by an empty line."""
    parser = _PageText()
    parser.feed(path.read_text(encoding="utf-8", errors="replace"))
    text = "".join(parser.parts)
    text = re.sub(r"[ \t]+\n", "\n", text)
    yield re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def dictionary(path: Path) -> Iterator[str]:
    """The entries of a `.dict.dz`, each once; its `.index` says where each lies (dictd)."""
    raw = gzip.decompress(path.read_bytes())
    index = path.with_name(path.name.removesuffix(".dict.dz") + ".index")
    places = set()
    for line in index.read_text(encoding="utf-8").splitlines():
        word, start, length = line.split("\t")[:3]
        if not word.startswith("00-database"):
            places.add((_number(start), _number(length)))
    for begin, size in sorted(places):
        yield raw[begin : begin + size].decode("utf-8", errors="replace").strip() + "\n"


def metamath(path: Path) -> Iterator[str]:
    """The sections of a database: theorems, their proofs and comments under one heading."""
    for section in _SECTION.split(path.read_text(encoding="utf-8")):
        yield section.strip() + "\n"


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = 64 * value + _DIGITS.index(digit)
    return value


def _is_dropped(tag: str, classes: str) -> bool:
    return tag in _DROPPED or _NAVIGATION.search(classes) is not None


class _PageText(HTMLParser):
    """Collects the text of a page in `parts`."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._dropped: list[str] = []  # open elements within a dropped one
        self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            self._break(tag)
        elif self._dropped or _is_dropped(tag, dict(attrs).get("class") or ""):
            self._dropped.append(tag)
        else:
            self._preformatted += tag == "pre"
            self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._dropped:
            while self._dropped.pop() != tag:
                pass
        elif not self._dropped:
            self._preformatted -= tag == "pre" and self._preformatted > 0
            self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._dropped:
            return
        if not self._preformatted:
            data = re.sub(r"\s+", " ", data)
            if not self.parts or self.parts[-1].endswith((" ", "\n")):
                data = data.lstrip()
        self.parts.append(data)

    def _break(self, tag: str) -> None:
        if not self._dropped and tag in _PARAGRAPHS | _LINES:
            wanted = 2 if tag in _PARAGRAPHS else 1
            self.parts.append("\n" * wanted if self.parts else "")
