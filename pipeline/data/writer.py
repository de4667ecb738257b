"""Writing a corpus: documents in their final order, from the parts that tokenizing left behind.

A plan says of each document of a shard in which part it lies, from where on, how many tokens it
has and how many padding tokens follow. A shard is written from its plan alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipeline.data.files import whole_file
from pipeline.data.packing import Layout
from pipeline.data.shards import describe_file, token_dtype, write_documents

_OPEN_PARTS = 1024  # systems limit how many files a process opens
_PLAN = np.dtype([("part", "<i4"), ("start", "<i8"), ("count", "<i4"), ("padding", "<i4")])

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Located:
    """Where the tokens of D documents are: number of the part file, first token, number of them."""

    part_D: Integers
    start_D: Integers
    count_D: Integers


def plan_shards(located: Located, layout: Layout, shard_tokens: int) -> list[NDArray[Any]]:
    """Plans of shards of at most `shard_tokens`, or of one longer document."""
    order = layout.order_D
    plan = np.empty(len(order), _PLAN)
    plan["part"], plan["start"] = located.part_D[order], located.start_D[order]
    plan["count"], plan["padding"] = located.count_D[order], layout.padding_D
    ends = np.cumsum(plan["count"].astype(np.int64) + plan["padding"])
    plans, first, written = [], 0, 0
    while first < len(plan):
        fitting = int(np.searchsorted(ends, written + shard_tokens, side="right"))
        last = max(fitting, first + 1)
        plans.append(plan[first:last])
        first, written = last, int(ends[last - 1])
    return plans


def write_shard(
    plan: Path, names: Sequence[str], parts: Path, folder: Path, stem: str, ids: tuple[int, int]
) -> None:
    """Write a planned shard, and beside its plan `<stem>.json`, its entry of the manifest.

    names: of the part files. ids: the vocabulary's size and the end-of-document token.
    """
    vocab_size, eos_id = ids
    dtype = token_dtype(vocab_size)

    @lru_cache(_OPEN_PARTS)
    def opened(part: int) -> BinaryIO:  # not mapped, which would add all its pages to memory
        return (parts / f"{names[part]}.tokens").open("rb", buffering=0)

    def documents() -> Iterator[NDArray[np.unsignedinteger]]:
        size = dtype.itemsize
        for part, start, count, padding in np.load(plan).tolist():
            raw = os.pread(opened(part).fileno(), count * size, start * size)
            tokens = np.frombuffer(raw, dtype)
            if padding:
                tokens = np.append(tokens, np.full(padding, eos_id, dtype))
            yield tokens

    entry = write_documents(folder, stem, documents(), vocab_size)
    with whole_file(plan.with_suffix(".json")) as file:
        file.write(json.dumps(entry).encode())


def write_holdout(
    folder: Path,
    name: str,
    texts: Sequence[str],
    tokens: Sequence[NDArray[Any]],
    reserved: Sequence[str],
    vocab_size: int,
) -> dict[str, Any]:
    """The held-out token stream, and the texts of it and of the reserved documents."""
    stem = f"holdout/{name}"
    (folder / "holdout").mkdir(exist_ok=True)
    entry = write_documents(folder, stem, tokens, vocab_size)
    lines = [{"text": text, "reserved": False} for text in texts]
    lines += [{"text": text, "reserved": True} for text in reserved]
    with (folder / f"{stem}.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    return {
        **entry,
        "bytes": sum(len(text.encode()) for text in texts),
        "reserved_documents": len(reserved),
        "texts": describe_file(folder, f"{stem}.jsonl"),
    }
