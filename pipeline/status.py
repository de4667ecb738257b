"""A run at a glance, from its files alone."""

from __future__ import annotations

import json
from datetime import timedelta

from pipeline.config import STAGES, Config
from pipeline.runs import RunFolder
from pipeline.train import checkpoint
from pipeline.train.metrics import final_records
from pipeline.train.schedule import Schedule


def describe(config: Config, run: RunFolder) -> list[str]:
    """Lines on stage, step, loss, time left, last checkpoint and skipped steps."""
    results = json.loads(run.results.read_text()) if run.results.is_file() else {}
    schedule = Schedule.of(config.train, tuple(config.data.sources))
    done = [name for name in STAGES if (run.stages / f"{name}.json").is_file()]
    lines = [
        f"run         {run.id}",
        f"status      {results.get('status', 'started')}",
        f"stages done {', '.join(done) or 'none'}",
    ]
    records = [record for record in final_records(run.metrics) if record["kind"] == "train"]
    if records:
        values, step = records[-1]["metrics"], records[-1]["step"]
        left = (schedule.num_steps - step) * schedule.tokens_per_step
        seconds = round(left / values["train/tokens_per_second"])
        lines += [
            f"step        {step} of {schedule.num_steps}, phase {values['train/phase'] + 1} of "
            f"{len(schedule.phases)}",
            f"tokens      {records[-1]['tokens']:,} at {values['train/tokens_per_second']:,.0f}/s",
            f"loss        {values['train/loss']:.4f}",
            f"skipped     {values['train/skipped_steps']} steps",
            f"time left   {timedelta(seconds=seconds)} of training",
        ]
    found = checkpoint.latest(run.checkpoints)
    lines.append(f"checkpoint  {found.path if found else 'none yet'}")
    return lines
