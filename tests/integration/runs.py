"""Commands that the integration tests run as a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

SHORT = (  # 24 steps over both phases, a checkpoint every 4
    "train.tokens=98_304",
    "train.warmup_tokens=16_384",
    "train.checkpoint_every_tokens=16_384",
    "train.validate_every_tokens=32_768",
    "train.validation_tokens=6_144",
    "train.statistics_every_steps=10",
    "data.sources.code.max_bytes=1_500_000",
    "data.sources.prose.max_bytes=1_000_000",
    "data.sources.mathematics.max_bytes=1_000_000",
    "data.tokenizer.vocab_size=1024",
    "data.holdout_max_bytes=40_000",
    "evals.num_questions=48",
)


@dataclass(frozen=True)
class Run:
    """A run's folder and what its command printed."""

    folder: Path
    output: str

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.folder / "results.json").read_text())

    @property
    def root(self) -> Path:
        return self.folder.parent


def command(root: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "pipeline", *arguments, f"root={root}"]


def pipeline(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a verb to its end, away from the sources' folder, as a user would."""
    return subprocess.run(
        command(root, *arguments), capture_output=True, text=True, cwd=root, timeout=900
    )


def run_folder(root: Path) -> Path:
    """The newest run below `root`."""
    return sorted(path.parent for path in root.glob("*/config.yaml"))[-1]


def start_and_kill(root: Path, *arguments: str, after_step: int, sig: int = signal.SIGKILL) -> int:
    """Start a run and end it once it has done `after_step` steps. Returns its exit code."""
    before = set(root.glob("*/config.yaml"))
    process = subprocess.Popen(
        command(root, *arguments), cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        started = set(root.glob("*/config.yaml")) - before
        for config in started:
            metrics = config.parent / "metrics.jsonl"
            if metrics.is_file() and f'"step": {after_step},' in metrics.read_text():
                if sig == signal.SIGKILL:
                    os.killpg(process.pid, sig)
                else:
                    process.send_signal(sig)
                return process.wait(timeout=60)
        time.sleep(0.02)
    raise AssertionError(f"the run never reached step {after_step} (exit {process.poll()})")
