"""Text that every Python installation holds: its library's code, and the prose about it.

Sources are parsed, never imported. The docstrings are prose and are cut from the code, so that no
document of one domain repeats a held-out one of the other.
"""

from __future__ import annotations

import ast
import gc
import inspect
import io
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from pipeline.data.document import DOCUMENT, EMPTY, Item, from_bytes, from_text

VERSION = 2  # raise it when the documents change
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_TOPICS = "pydoc_data/topics.py"  # the language reference as a dict of texts: prose, not code
_MIN_DOCSTRING = 60  # characters; shorter ones say what the name already says
_Defined: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_Documented: TypeAlias = ast.Module | _Defined


def library_folder() -> Path:
    """Where the running Python keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def library_files() -> list[str]:
    """The library's Python files relative to its folder, sorted, without tests and packages."""
    root = library_folder()
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        found += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    return sorted(os.path.relpath(path, root).replace(os.sep, "/") for path in found)


def code_document(relative: str) -> Item:
    """A library file's code, docstrings cut."""
    if relative == _TOPICS:
        return Item(EMPTY)
    item = from_bytes((library_folder() / relative).read_bytes())
    tree = _parse(item)
    return item if tree is None else from_text(_without_docstrings(item.text, tree))


def prose_documents(relative: str) -> Iterator[Item]:
    """A library file's docstrings as one document, or each topic of the language reference."""
    item = from_bytes((library_folder() / relative).read_bytes())
    tree = _parse(item)
    if tree is None:
        yield item if item.status != DOCUMENT else Item(EMPTY)
    elif relative == _TOPICS:
        yield from map(from_text, _topics(tree))
    else:
        name = relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        yield from_text("\n\n".join(_docstrings(tree, name)))


def _parse(item: Item) -> ast.Module | None:
    if item.status != DOCUMENT:
        return None
    gc.disable()  # a tree is many objects and no garbage: collecting took most of the time
    try:
        return ast.parse(item.text)
    except (SyntaxError, ValueError):
        return None
    finally:
        gc.enable()


def _topics(tree: ast.Module) -> Iterator[str]:
    """The values of the file's one dictionary of literals."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for value in node.value.values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value.strip() + "\n"


def _docstrings(tree: ast.Module, module: str) -> Iterator[str]:
    """'name\\n\\ndocstring' of the module and all it defines, in order, each docstring once."""
    seen = set()
    for name, node in _documented(tree, module):
        text = ast.get_docstring(node, clean=False)
        text = inspect.cleandoc(text) if text else ""
        if len(text) >= _MIN_DOCSTRING and text not in seen:
            seen.add(text)
            yield f"{name}\n\n{text}\n"


def _documented(node: ast.AST, name: str) -> Iterator[tuple[str, _Documented]]:
    """The module, classes and functions below a node, at any depth, with their dotted names."""
    if isinstance(node, _Documented):
        yield name, node
    for field in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, field, ()):
            inner = f"{name}.{child.name}" if isinstance(child, _Defined) else name
            yield from _documented(child, inner)


def _without_docstrings(text: str, tree: ast.Module) -> str:
    """The text without its docstrings' lines; a body of a docstring only becomes `...`."""
    lines = list(io.StringIO(text, newline=""))  # as the parser counts them, not at form feeds
    for _, node in _documented(tree, ""):
        first = node.body[0] if node.body else None
        if first is None or ast.get_docstring(node, clean=False) is None:
            continue
        begin, end = first.lineno - 1, first.end_lineno or first.lineno
        alone = lines[begin].lstrip().startswith(('"', "'", "r", "R", "u", "U"))
        if not alone or (len(node.body) > 1 and node.body[1].lineno == end):
            continue  # it shares its line with other code
        left = "" if len(node.body) > 1 or isinstance(node, ast.Module) else "...\n"
        indent = " " * first.col_offset if left else ""
        lines[begin:end] = [indent + left] + [""] * (end - begin - 1)
    return "".join(lines)
