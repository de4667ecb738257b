"""Kills runs with SIGKILL at chosen moments, goes on with them, and compares them to the bit.

A run is started by its name, so the same command again goes on with it. What is killed:

    process    the one process of local mode: command, training and saving at once
    worker     one of two Ray Train workers; Ray starts the group again by itself
    raylet     Ray's own process on the node
    driver     the command alone
    cluster    the command and every process that it started
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from pipeline.train import checkpoint
from pipeline.train.metrics import final_records, read_records

INTERVAL, STEPS, TOKENS_PER_STEP = 50, 400, 128
CLOCKED = ("train/tokens_per_second", "train/seconds_waiting_for_data")
TINY = (  # steps of some 30 ms, stochastic rounding in every linear, two phases
    "stages=[prepare,train]",
    "precision=nvfp4_paper", "precision.first=0", "precision.last=0",
    "model.pattern=M-*", "model.vocab_size=512", "model.hidden_size=32",
    "model.ffn_hidden_size=64", "model.num_attention_heads=2", "model.num_kv_heads=1",
    "model.attention_head_dim=16", "model.mamba_num_heads=4", "model.mamba_head_dim=16",
    "model.mamba_state_size=16", "model.mamba_chunk_size=16",
    "data.sources.code.max_bytes=300_000", "data.sources.prose.max_bytes=200_000",
    "data.sources.mathematics.max_bytes=200_000", "data.tokenizer.vocab_size=512",
    "data.holdout_max_bytes=20_000",
    "train.sequence_length=32", "train.global_batch=4", "train.micro_batch=2",
    f"train.tokens={STEPS * TOKENS_PER_STEP}", "train.warmup_tokens=1280",
    f"train.checkpoint_every_tokens={INTERVAL * TOKENS_PER_STEP}",
    f"train.validate_every_tokens={4 * INTERVAL * TOKENS_PER_STEP}",
    "train.validation_tokens=384", "train.statistics_every_steps=40",
    "tracking.offline=true",
)  # fmt: skip
RAY = ("cluster=cpu2", "cluster.max_failures=100")
TARGETS = ("process", "worker", "raylet", "driver", "cluster")
DEADLINE = 600.0  # seconds that any one wait may take
RAYLET_SECONDS = 30.0  # after which a command whose raylet died is killed too


@dataclass(frozen=True)
class Moment:
    """When to kill: after so many steps, `saving`: in the next checkpoint's writing after them."""

    steps_on: int
    saving: bool

    @staticmethod
    def draw(generator: random.Random) -> Moment:
        return Moment(generator.randint(2, 90), generator.random() < 0.3)


@dataclass(frozen=True)
class Kill:
    """What one kill met. `replayed`: steps done before the run went on that were done again."""

    run: str
    target: str
    at_step: int
    saving: bool
    resumed_from: int

    @property
    def replayed(self) -> int:
        return self.at_step - self.resumed_from


class Case:
    """One run below `root`, killed and resumed. settings: beside those that all runs share."""

    def __init__(
        self, root: Path, name: str, ray: bool = False, settings: Sequence[str] = ()
    ) -> None:
        self.root, self.name = root, name
        self.settings = (*(RAY if ray else ()), *settings)
        self.folder, self.log = root / name, root / f"{name}.log"
        self._started: list[psutil.Process] = []
        self._seen: list[dict[str, Any]] = []
        self._offset = 0

    def run(self, plan: Sequence[tuple[str, Moment]]) -> list[Kill]:
        """Go to the end of the run through the kills of the plan, as far as it takes them."""
        process: psutil.Popen | None = None
        met: list[tuple[str, bool]] = []
        try:
            for target, moment in plan:
                process = process or self.start()
                if not self._wait_for(process, moment, start=len(met)):
                    break
                self._kill(process, target)
                met.append((target, self._is_saving()))
                process = self._going_on(process, target)
            process = process or self.start()
            assert process.wait(DEADLINE) == 0, f"see {self.log}"
        finally:
            psutil.wait_procs([_kill(item) for item in self._started], 60)
        restarts = self._restarts()
        assert len(restarts) == len(met), f"{self.name}: {len(restarts)} restarts, {len(met)} kills"
        return [
            Kill(self.name, target, at_step, saving, resumed_from)
            for (target, saving), (at_step, resumed_from) in zip(met, restarts, strict=True)
        ]

    def _restarts(self) -> list[tuple[int, int]]:
        """The last step before each start but the first, and the step that it went on from.

        Workers may go on for a while after their raylet or command was killed; these steps count.
        """
        found, last = [], 0
        for record in self.records():
            if record["kind"] == "start":
                found.append((last, record["step"]))
            elif record["kind"] == "train":
                last = record["step"]
        return found[1:]

    def start(self) -> psutil.Popen:
        """The run's command, always the same."""
        overrides = [*TINY, *self.settings, f"root={self.root}", f"name={self.name}"]
        self.root.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return psutil.Popen(
                [sys.executable, "-m", "pipeline", "run", *overrides],
                cwd=self.root,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _kill(self, process: psutil.Popen, target: str) -> None:
        """Kill, and nothing else."""
        family = [process, *process.children(recursive=True)]
        self._started += family
        for victim in _victims(family, target):
            _kill(victim)

    def _going_on(self, process: psutil.Popen, target: str) -> psutil.Popen | None:
        """The process that goes on with the run after the kill, if one does."""
        if target == "worker":
            return process
        try:
            process.wait(RAYLET_SECONDS)
        except psutil.TimeoutExpired:  # a command without its raylet may wait for ever
            process.kill()
            process.wait(60)
        return None

    def records(self) -> list[dict[str, Any]]:
        """All that the run has logged so far, in order."""
        for record, offset in read_records(self.folder / "metrics.jsonl", self._offset):
            self._seen.append(record)
            self._offset = offset
        return self._seen

    def _last_step(self) -> int:
        steps = (record["step"] for record in reversed(self.records()) if record["kind"] == "train")
        return next(steps, 0)

    def _wait_for(self, process: psutil.Popen, moment: Moment, start: int) -> bool:
        """Until the moment, counted from the run's start of that number; whether it came."""
        deadline = time.monotonic() + DEADLINE
        while process.poll() is None:
            assert time.monotonic() < deadline, f"{self.name} hangs"
            starts = [record["step"] for record in self.records() if record["kind"] == "start"]
            if len(starts) > start and self._last_step() - starts[start] >= moment.steps_on:
                return not moment.saving or self._wait_for_save(process)
            time.sleep(0.01)
        return False

    def _wait_for_save(self, process: psutil.Popen) -> bool:
        """Until a checkpoint is being written; False where the run ends before."""
        while process.poll() is None:
            if self._is_saving():
                return True
        return False

    def _is_saving(self) -> bool:
        """Whether a checkpoint lies half written: after a kill, that it fell into a save."""
        return any((self.folder / "checkpoints").glob(".partial-*"))


def differences(one: Case, other: Case, steps: int = STEPS) -> list[str]:
    """In what the ends of two finished runs differ, bit for bit; empty where in nothing."""
    found = []
    last = [checkpoint.at_step(case.folder / "checkpoints", steps) for case in (one, other)]
    for group in ("model", "optimizer"):
        tensors, others = (item.tensors(group) for item in last)
        found += [
            f"{group} {name}"
            for name in sorted(tensors.keys() | others.keys())
            if not (name in tensors and name in others and _same(tensors[name], others[name]))
        ]
    curve, other_curve = curve_of(one), curve_of(other)
    if curve.keys() != other_curve.keys():
        found.append(f"curve: points {sorted(curve.keys() ^ other_curve.keys())[:5]}")
    found += [f"curve {key}" for key in curve if curve[key] != other_curve.get(key)]
    return found


def curve_of(case: Case) -> dict[tuple[str, int], dict[str, float]]:
    """Everything logged but what a clock decides, by kind and step."""
    return {
        (record["kind"], record["step"]): {
            k: v for k, v in record["metrics"].items() if k not in CLOCKED
        }
        for record in final_records(case.folder / "metrics.jsonl")
        if record["kind"] in ("train", "validation", "statistics")
    }


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


def _victims(family: Sequence[psutil.Process], target: str) -> Sequence[psutil.Process]:
    if target in ("process", "driver"):
        return family[:1]
    if target == "cluster":
        return family
    mark = "raylet/raylet" if target == "raylet" else "RayTrainWorker"
    found = [item for item in family if mark in _command(item)]
    assert found, f"no {target} among {[_command(item) for item in family]}"
    return [random.choice(found)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _kill(process: psutil.Process) -> psutil.Process:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
    return process
