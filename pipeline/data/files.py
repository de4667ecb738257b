"""Files that appear whole or not at all, so that an interrupted preparation can go on."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pipeline.config import ConfigError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that gets its name when the block ends; two writers do not disturb."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("wb") as file:
            yield file
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def link(source: Path, target: Path) -> None:
    """The same file under a second name: a hard link, or a copy where there are none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def is_full(error: OSError) -> bool:
    """Whether the error says that a disk or a quota is exhausted."""
    return error.errno in _FULL


def full_disk(work: Path) -> ConfigError:
    """What to tell the user of a disk that filled up while preparing in `work`."""
    mount = next(path for path in (work, *work.parents) if path.is_mount())
    free = shutil.disk_usage(work).free
    return ConfigError(
        f"root: the disk at {mount} is full ({free / 1e6:,.0f} MB free); what is done stays in "
        f"{work}, so make room and give the same command again, or choose another root=..."
    )
