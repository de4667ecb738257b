"""Preparing a corpus: where it belongs, whether it is there already, and making it atomically."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from pipeline.config import ConfigError, DataConfig, digest, nearest
from pipeline.data import shards
from pipeline.data.files import full_disk, is_full
from pipeline.data.packing import PACKINGS
from pipeline.data.shards import DataError, Dataset, open_corpus, read_manifest
from pipeline.data.sources import check_sources, evaluation_files, identity
from pipeline.data.summary import table
from pipeline.data.tokenizer import check_tokenizer, tokenizer_json

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
VERSION = 2  # raise it when the same sources would give another corpus
Progress = Callable[[str], None]


def check(data: DataConfig) -> None:
    """What can be wrong with the data's configuration, before any work. Raises `ConfigError`."""
    check_sources(data)
    evaluation_files(data)
    check_tokenizer(data.tokenizer)
    for key, value, known in (
        ("executor", data.executor, EXECUTORS),
        ("on_corrupt", data.on_corrupt, ON_CORRUPT),
        ("packing", data.packing, PACKINGS),
    ):
        if value not in known:
            raise ConfigError(f"data.{key}: no {value!r}; {nearest(value, known)}")


def prepared_folder(data: DataConfig, root: Path) -> Path:
    """Where the corpus of this configuration and these inputs belongs. Lists files, reads none."""
    decisive = dataclasses.asdict(data)
    for name in IN_TRAINING:
        del decisive[name]
    if data.packing != "best_fit":
        del decisive["row_length"]
    for source in decisive["sources"].values():
        del source["repeat"]
    path = data.tokenizer.path
    content = tokenizer_json(path).encode() if path else version("tokenizers").encode()
    tokenizer = hashlib.sha256(content).hexdigest()
    key = digest([VERSION, shards.FORMAT_VERSION, decisive, identity(data), tokenizer])
    return root / "data" / f"{data.name}-{key[:12]}"


def prepare(
    data: DataConfig, root: Path, *, progress: Progress = print, address: str | None = None
) -> Path:
    """The folder of the prepared corpus, made unless it exists already.

    `address` is a Ray cluster's; without one, Ray as it runs already or for the time needed. The
    folder appears whole or not at all: it is made beside its place and renamed. What an interrupted
    call has done stays there, and the same call goes on with it. Of two at once the second waits.
    Raises `ConfigError` for a mistake in the configuration, a full disk or a root that cannot be
    written, `DataError` for a damaged corpus.
    """
    check(data)
    folder = prepared_folder(data, Path(root).expanduser().resolve())
    if folder.exists():
        dataset = open_corpus(data, folder)
        progress(f"data: {folder} is up to date (content {dataset.content_hash[:12]})")
        return folder
    from pipeline.data.build import build  # imports Ray, which a prepared corpus does not need

    with _workspace(folder, progress) as work:
        if folder.exists():
            progress("data: another process prepared the same corpus meanwhile")
            Dataset.open(folder)
        else:
            build(data, work, progress, address)
            work.rename(folder)
    for line in table(read_manifest(folder)):
        progress(line)
    progress(f"data: prepared {folder}")
    return folder


@contextmanager
def _workspace(folder: Path, progress: Progress) -> Iterator[Path]:
    """The folder to work in, beside the corpus's place, for this process alone.

    Errors of writing there become a `ConfigError` that says what to do.
    """
    work = folder.parent / f".{folder.name}"
    lock = folder.parent / f".{folder.name}.lock"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        held = lock.open("w")
    except OSError as error:
        raise _cannot_write(folder.parent, error) from None
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("data: another process is preparing this corpus; waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        try:
            if work.exists():
                progress("data: going on with a preparation that was interrupted")
            elif not folder.exists():
                work.mkdir()
            yield work
        except OSError as error:
            raise (full_disk(work) if is_full(error) else error) from None
        lock.unlink(missing_ok=True)


def _cannot_write(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"root: cannot write in {folder} ({error.strerror}); choose another root=..."
    )


__all__ = ["DataError", "check", "prepare", "prepared_folder"]
