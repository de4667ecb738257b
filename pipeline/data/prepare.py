"""Preparing a corpus: where it belongs, whether it is there already, and making it atomically."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from pipeline.config import ConfigError, DataConfig, digest, nearest
from pipeline.data import shards
from pipeline.data.shards import DataError, Dataset, open_corpus
from pipeline.data.sources import check_sources, identity
from pipeline.data.tokenizer import check_tokenizer

EXECUTORS = ("mmap", "ray")
ON_CORRUPT = ("stop", "skip")
IN_TRAINING = (  # keys of data that do not matter before
    "mixture_block",
    "executor",
    "shards_uri",
    "prefetch_bytes",
    "across_documents",
    "on_corrupt",
    "max_epochs",
    "skip",
    "block",
)
VERSION = 1  # raise it when the same sources would give another corpus
Progress = Callable[[str], None]


def check(data: DataConfig) -> None:
    """What can be wrong with the data's configuration, before any work. Raises `ConfigError`."""
    check_sources(data)
    check_tokenizer(data.tokenizer)
    for key, value, known in (
        ("executor", data.executor, EXECUTORS),
        ("on_corrupt", data.on_corrupt, ON_CORRUPT),
    ):
        if value not in known:
            raise ConfigError(f"data.{key}: no {value!r}; {nearest(value, known)}")


def prepared_folder(data: DataConfig, root: Path) -> Path:
    """Where the corpus of this configuration and these inputs belongs. Lists files, reads none."""
    decisive = dataclasses.asdict(data)
    for name in IN_TRAINING:
        del decisive[name]
    for source in decisive["sources"].values():
        del source["repeat"]
    path = data.tokenizer.path
    tokenizer = shards.file_sha256(Path(path)) if path else version("tokenizers")
    key = digest([VERSION, shards.FORMAT_VERSION, decisive, identity(data), tokenizer])
    return root / "data" / f"{data.name}-{key[:12]}"


def prepare(
    data: DataConfig, root: Path, *, progress: Progress = print, address: str | None = None
) -> Path:
    """The folder of the prepared corpus, made unless it exists already.

    `address` is a Ray cluster's; without one, Ray as it runs already or for the time needed. The
    folder appears whole or not at all: it is written beside its place and renamed. Two at once
    both do the work, and the first to end wins. Raises `ConfigError` for a mistake in the
    configuration, a full disk or a root that cannot be written, `DataError` for a damaged corpus.
    """
    check(data)
    folder = prepared_folder(data, Path(root).expanduser().resolve())
    if folder.exists():
        dataset = open_corpus(data, folder)
        progress(f"data: {folder} is up to date (content {dataset.content_hash[:12]})")
        return folder
    from pipeline.data.build import build  # imports Ray, which a prepared corpus does not need

    with _workspace(folder) as workspace:
        build(data, workspace, progress, address)
        try:
            workspace.rename(folder)
        except OSError:
            Dataset.open(folder)  # else the reason is another one, and said here
            progress("data: another process prepared the same corpus meanwhile")
    progress(f"data: prepared {folder}")
    return folder


@contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, deleted afterwards unless renamed.

    What a killed process of this machine left behind is deleted first.
    """
    prefix = f".{folder.name}.{socket.gethostname()}-"
    workspace = folder.parent / f"{prefix}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for path in folder.parent.glob(f"{prefix}*"):
            if not _is_running(int(path.name.removeprefix(prefix).split("-")[0])):
                shutil.rmtree(path, ignore_errors=True)
        workspace.mkdir()
    except OSError as error:
        raise ConfigError(
            f"root: cannot write in {folder.parent} ({error.strerror}); choose another root=..."
        ) from None
    try:
        yield workspace
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


__all__ = ["DataError", "check", "prepare", "prepared_folder"]
