"""Golden curves: the first steps of a tiny run in each precision, to the last bit.

A refactor must leave them identical. They depend on the order of sums, hence on the machine: each
is kept under a key of processor, instruction set, threads and torch's version. `python -m
tests.golden` writes those of this machine, after a change that is meant to change them.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import tempfile
from pathlib import Path

import torch

from pipeline.config import PrecisionConfig
from pipeline.train.metrics import final_records
from tests.train.tiny import configuration, corpus, start, train

FILE = Path(__file__).with_name("curves.json")
PRECISIONS = ("bf16", "fp8_block", "nvfp4", "nvfp4_paper", "mxfp4")
STEPS = 50


def key() -> str:
    """What the sums of this machine depend on."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor()
    instructions = torch.backends.cpu.get_cpu_capability()
    version = torch.__version__.partition("+")[0]
    return f"{processor}, {instructions}, 1 thread, torch {version}"


def curve(precision: str) -> list[str]:
    """Loss and gradient norm of each step, as hexadecimal floats, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            config = configuration(root, STEPS, checkpoint_every_tokens=0)
            config = dataclasses.replace(config, precision=PrecisionConfig(precision, 0, 0))
            run = start(config, "golden")
            train(config, run, corpus(root / "corpus"))
            records = [r for r in final_records(run.metrics) if r["kind"] == "train"]
    finally:
        torch.set_num_threads(threads)
    names = ("train/loss", "train/grad_norm")
    return [" ".join(float(r["metrics"][name]).hex() for name in names) for r in records]


def known() -> dict[str, dict[str, list[str]]]:
    """Curves by key and precision."""
    return json.loads(FILE.read_text()) if FILE.is_file() else {}


def write() -> None:
    """Replace this machine's curves."""
    curves = {precision: curve(precision) for precision in PRECISIONS}
    FILE.write_text(json.dumps({**known(), key(): curves}, indent=1, sort_keys=True) + "\n")
