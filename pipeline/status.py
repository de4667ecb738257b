"""A run at a glance, from its files alone."""

from __future__ import annotations

import json
from datetime import timedelta

from pipeline.config import STAGES, Config
from pipeline.goodput import goodput
from pipeline.lineage import lineage_of, schedule_of
from pipeline.runs import RunFolder, is_locked
from pipeline.train import checkpoint
from pipeline.train.metrics import read_records

NOTES_SHOWN = 3


def describe(config: Config, run: RunFolder) -> list[str]:
    """Lines on stage, step, loss, time left, last checkpoint, restarts and skipped steps."""
    results = json.loads(run.results.read_text()) if run.results.is_file() else {}
    schedule = schedule_of(config, run)
    done = [name for name in STAGES if (run.stages / f"{name}.json").is_file()]
    lines = [
        f"run         {run.id}",
        f"status      {_status(results.get('status', 'started'), run)}",
        f"stages done {', '.join(done) or 'none'}",
    ]
    lineage = lineage_of(run)
    if lineage:
        changed = "; ".join(lineage.difference) or "nothing changed"
        lines.append(f"child of    {lineage.parent} at step {lineage.step}: {changed}")
    records = [record for record, _ in read_records(run.metrics)]
    trained = [record for record in records if record["kind"] == "train"]
    if trained:
        values, step = trained[-1]["metrics"], trained[-1]["step"]
        put = goodput(records, schedule.tokens_per_step)
        left = (schedule.num_steps - step) * schedule.tokens_per_step
        seconds = round(left / values["train/tokens_per_second"])
        starts = sum(record["kind"] == "start" for record in records)
        lines += [
            f"step        {step} of {schedule.num_steps}, phase {values['train/phase'] + 1} of "
            f"{len(schedule.phases)}",
            f"tokens      {trained[-1]['tokens']:,} at {values['train/tokens_per_second']:,.0f}/s",
            f"loss        {values['train/loss']:.4f}",
            f"skipped     {values['train/skipped_steps']} steps",
            f"restarts    {max(starts - 1, 0)}",
            *([f"goodput     {put.useful:.0%}, {put.replayed} steps done again"] if put else []),
            f"time left   {timedelta(seconds=seconds)} of training",
        ]
    lines.append(f"checkpoint  {_last_checkpoint(run)}")
    notes = [record["note"] for record in records if "note" in record]
    lines += [f"note        {note}" for note in notes[-NOTES_SHOWN:]]
    if run.hang.is_file():
        lines.append(f"hang        {run.hang.read_text()}")
    if run.failure.is_file():
        lines.append(f"failure     {json.loads(run.failure.read_text())['error']}")
    return lines


def _status(recorded: str, run: RunFolder) -> str:
    """What the run recorded of itself; a process that was killed could not."""
    if recorded in {"running", "started"} and not is_locked(run):
        return "stopped (its process is gone); the same command with resume goes on"
    return recorded


def _last_checkpoint(run: RunFolder) -> str:
    """The newest one by its name: reading it through would take long."""
    steps = checkpoint.steps_in(run.checkpoints)
    return f"step {steps[-1]} in {run.checkpoints}" if steps else "none yet"
