"""Which GEMM kernel is fastest for a shape: measured once on a card, then read.

`python -m kernels.tuner 8192x4096x4096 ...` (M x N x R) writes one JSON file a card. Training only
reads it. All ranks of a run must read the same file, since another kernel adds in another order:
put `NVFP4_TUNE` on a shared disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Entry:
    """The fastest kernel of a problem.

    Attributes:
        kernel: a name in `kernels.dispatch.TABLE`.
        tiling: index in `kernels.gemm.tilings`; 0 for kernels that are not ours.
        microseconds: its median time.
    """

    kernel: str
    tiling: int
    microseconds: float


def folder() -> Path:
    """Where tunes are stored: `NVFP4_TUNE`, or the user's cache."""
    given = os.environ.get("NVFP4_TUNE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nvfp4-pretrain"


def path(card: str) -> Path:
    """The file of a card, under the versions that decide its speed; our own kernel's is its text's,
    which also says what a tiling's index means."""
    kernel = hashlib.sha256(Path(__file__).with_name("gemm.py").read_bytes()).hexdigest()[:8]
    versions = f"{card} torch {torch.__version__} cuda {torch.version.cuda} gemm {kernel}"
    return folder() / f"gemm_{re.sub('[^A-Za-z0-9.]+', '_', versions)}.json"


def load(card: str) -> dict[str, Entry]:
    """What was measured on a card, by problem; nothing if it has no tune.

    Raises:
        ValueError: the file is not a tune.
    """
    file = path(card)
    if not card or not file.exists():
        return {}
    try:
        return {name: Entry(**entry) for name, entry in json.loads(file.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a tune ({error}); delete it, and tune again") from error


def save(card: str, entries: Mapping[str, Entry]) -> Path:
    """Add entries to the file of a card, whole or not at all."""
    file = path(card)
    file.parent.mkdir(parents=True, exist_ok=True)
    merged = {**load(card), **entries}
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.write_text(json.dumps({k: asdict(v) for k, v in sorted(merged.items())}, indent=1))
    beside.replace(file)
    return file
