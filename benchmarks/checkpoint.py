"""What a checkpoint costs: how long it stops the step, and how fast it reaches the disk.

Method: one rank, parameters and AdamW's two moments of a model of `--megabytes` in all, on the CPU,
in rounds that alternate between the candidates; medians count and a warm-up round comes first.

    host_copy     copying all tensors to buffers that exist: the least that a save must do
    blocked       `Saver.save`: what the training step waits for
    plain_write   the same bytes in one file, flushed to the disk: the most that the disk gives
    checkpoint    `Saver.save` until the checkpoint is complete: safetensors files, SHA-256 of each,
                  everything flushed to the disk, renamed

    ratios   blocked_vs_host_copy = blocked / host_copy (goal: at most 1.5)
             bandwidth_vs_plain_write = plain_write / checkpoint (goal: at least 0.7)

    python benchmarks/checkpoint.py [--json] [--rounds 7] [--megabytes 600] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.train.parallel import Rank
from pipeline.train.saver import Saver

ROWS, COLUMNS = 2048, 1024  # of each parameter: 8 MiB in FP32


def tensors(megabytes: int) -> dict[str, dict[str, Tensor]]:
    """Parameters and both moments, in the groups of a checkpoint."""
    count = max(1, megabytes * 2**20 // (3 * 4 * ROWS * COLUMNS))
    generator = torch.Generator().manual_seed(0)

    def random() -> Tensor:
        return torch.randn(ROWS, COLUMNS, generator=generator)

    names = [f"blocks.{i}.ffn.up.weight" for i in range(count)]
    moments = {f"{name}/{key}": random() for name in names for key in ("exp_avg", "exp_avg_sq")}
    return {"model": {name: random() for name in names}, "optimizer": moments}


def plain_write(file: Path, flat: list[Tensor]) -> float:
    """Seconds to write the bytes of all tensors and flush them to the disk."""
    start = time.perf_counter()
    with file.open("wb", buffering=0) as out:
        for tensor in flat:
            out.write(memoryview(tensor.numpy()).cast("B"))
        os.fsync(out.fileno())
    seconds = time.perf_counter() - start
    file.unlink()
    return seconds


def measure(folder: Path, megabytes: int, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each candidate by round, and the bytes of a checkpoint's tensors."""
    groups = tensors(megabytes)
    flat = [tensor for group in groups.values() for tensor in group.values()]
    buffers = [torch.empty_like(tensor) for tensor in flat]
    saver = Saver(folder, Rank(), "benchmark", lambda saved: None)
    seconds: dict[str, list[float]] = {
        name: [] for name in ("host_copy", "blocked", "plain_write", "checkpoint")
    }
    for step in range(rounds + 1):
        start = time.perf_counter()
        for buffer, tensor in zip(buffers, flat, strict=True):
            buffer.copy_(tensor)
        seconds["host_copy"].append(time.perf_counter() - start)
        seconds["plain_write"].append(plain_write(folder / "plain", flat))
        start = time.perf_counter()
        saver.save(0, groups, {"round": step})
        seconds["blocked"].append(time.perf_counter() - start)
        assert saver.settle() == ""
        seconds["checkpoint"].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}, sum(t.nbytes for t in flat)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measured, size = measure(Path(folder), arguments.megabytes, arguments.rounds)
    median = {name: statistics.median(values) for name, values in measured.items()}
    rows = [
        {
            "name": name,
            "milliseconds": round(seconds * 1e3, 1),
            "gigabytes_per_second": round(size / seconds / 1e9, 2),
        }
        for name, seconds in median.items()
    ]
    ratios = {
        "blocked_vs_host_copy": round(median["blocked"] / median["host_copy"], 3),
        "bandwidth_vs_plain_write": round(median["plain_write"] / median["checkpoint"], 3),
    }
    machine = (
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{size / 2**20:.0f} MiB"
    )
    if arguments.json:
        print(json.dumps({"machine": machine, "rows": rows, "ratios": ratios}))
        return
    print(__doc__)
    print(machine)
    print(f"{'':12}{'ms':>10}{'GB/s':>8}")
    for row in rows:
        print(f"{row['name']:12}{row['milliseconds']:>10}{row['gigabytes_per_second']:>8}")
    for name, value in ratios.items():
        print(f"{name} = {value}")


if __name__ == "__main__":
    main()
