"""What the burn-in measures: a card's peaks, and the tiny run on it and on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from kernels.burnin.verdicts import CheckError

STEPS = 200
TOKENS_PER_STEP = 4096
SECONDS = 180.0
"""After which what both runs have done is compared."""


def measure_peaks(device: torch.device) -> tuple[float, float]:
    """Bytes a second of a copy of 1 GiB, read and written, and operations a second in BF16."""
    from triton.testing import do_bench

    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = do_bench(lambda: target.copy_(source), return_mode="median") / 1e3
    size = 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    multiplied = do_bench(lambda: a @ b, return_mode="median") / 1e3
    return 2 * source.numel() / copied, 2 * size**3 / multiplied


def command(root: Path, name: str, stages: str, gpus: int) -> list[str]:
    """The tiny run's command line."""
    return [
        *(sys.executable, "-m", "pipeline", "run", f"stages=[{stages}]"),
        *(f"root={root}", f"name={name}", "tracking.offline=true"),
        *(f"train.tokens={STEPS * TOKENS_PER_STEP}", f"cluster.gpus_per_worker={gpus}"),
    ]


def two_runs(root: Path, seconds: float = SECONDS) -> tuple[list[float], list[float]]:
    """Losses by step on the card and on the CPU.

    Raises:
        CheckError: the corpus cannot be prepared, or a run fails.
    """
    prepared = subprocess.run(command(root, "corpus", "prepare", 0), capture_output=True, text=True)
    if prepared.returncode:
        raise CheckError(
            f"the corpus was not prepared: {_last_line(prepared.stdout + prepared.stderr)}"
        )
    runs = {}
    for name, gpus in (("card", 1), ("cpu", 0)):
        with (root / f"{name}.log").open("w") as log:
            arguments = command(root, name, "prepare,train", gpus)
            runs[name] = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT)
    end = time.monotonic() + seconds
    for name, process in runs.items():
        try:
            failed = process.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            continue
        if failed:
            text = (root / f"{name}.log").read_text()
            for other in runs.values():
                other.terminate()
            raise CheckError(f"the run on the {name} failed: {_last_line(text)}")
    return losses(root, "card"), losses(root, "cpu")


def losses(root: Path, name: str) -> list[float]:
    """Training losses of a run, in the order of its steps."""
    found = sorted(root.glob(f"**/*{name}*/metrics.jsonl"))
    if not found:
        return []
    records = [json.loads(line) for line in found[0].read_text().splitlines()]
    return [r["metrics"]["train/loss"] for r in records if r["kind"] == "train"]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]
