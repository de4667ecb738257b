"""The verb `data at`: which documents an optimizer step of a run saw.

Nothing was written down while training: the order is a pure function, so the plan of the run, its
corpus and what its checkpoints say was left out give the answer for any step, past or to come.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pipeline.config import Config, ConfigError
from pipeline.data.lookup import SeenUnit, units_of
from pipeline.data.prepare import prepared_folder
from pipeline.data.shards import open_corpus
from pipeline.data.stream import MixtureStream
from pipeline.data.tokenizer import load_tokenizer
from pipeline.lineage import lineage_of, schedule_of
from pipeline.runs import RunFolder, find_run, load_config, root_folder
from pipeline.train import checkpoint
from pipeline.train.build import build_mixture
from pipeline.train.exclusions import Exclusions
from pipeline.train.metrics import read_records
from pipeline.train.schedule import Schedule


def describe_step(config: Config, run: RunFolder, step: int) -> Iterator[str]:
    """Lines on a step of a run, its units and their documents.

    `step` is the step's index, from 0, as messages name it. A step before a fork is the parent's.
    Raises `ConfigError` where the step lies outside the schedule, or the corpus is not the run's.
    """
    config, run = _owner(config, run, step)
    schedule = schedule_of(config, run)
    if not 0 <= step < schedule.num_steps:
        raise ConfigError(
            f"step={step}: the steps of run {run.id} are 0 to {schedule.num_steps - 1}"
        )
    state = checkpoint.newest_state(run.checkpoints)
    dataset = open_corpus(config.data, _corpus(config, run))
    if state and state["identity"]["data"] != dataset.content_hash:
        raise ConfigError(
            f"{dataset.folder} is not the corpus that run {run.id} was trained on; restore that"
        )
    stream = MixtureStream(dataset, build_mixture(config, schedule, dataset), schedule.unit_length)
    exclusions = (
        Exclusions.from_dict(state["exclusions"]) if state else Exclusions().resumed(config.data, 0)
    )
    size = config.train.micro_batch
    units = range(step * schedule.global_batch, (step + 1) * schedule.global_batch)
    yield from _head(config, run, schedule, step, units)
    yield from _remarks(run, exclusions, step)
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    for unit in units_of(stream, units, tokenizer, exclusions.blocked(step)):
        yield from _lines(unit, (unit.index - units.start) // size)


def _owner(config: Config, run: RunFolder, step: int) -> tuple[Config, RunFolder]:
    """The run, or the ancestor, that did the step."""
    lineage = lineage_of(run)
    if lineage is None or step >= lineage.step:
        return config, run
    parent = find_run(root_folder(config), lineage.parent)
    return _owner(load_config(parent), parent, step)


def _corpus(config: Config, run: RunFolder) -> Path:
    """Where the run's corpus is, or would be; nothing is prepared."""
    manifest = run.stages / "prepare.json"
    if manifest.is_file():
        return Path(json.loads(manifest.read_text())["output"]["dataset"])
    return prepared_folder(config.data, root_folder(config))


def _head(
    config: Config, run: RunFolder, schedule: Schedule, step: int, units: range
) -> Iterator[str]:
    phase = schedule.phase(step)
    size, rows = config.train.micro_batch, schedule.unit_length // phase.sequence_length
    yield f"run         {run.id}"
    yield (
        f"step        {step} of 0 to {schedule.num_steps - 1}; point {step + 1} of the curves, at "
        f"{(step + 1) * schedule.tokens_per_step:,} tokens"
    )
    yield (
        f"phase       {schedule.phase_index(step) + 1} of {len(schedule.phases)}, precision "
        f"{phase.precision}, rows of {phase.sequence_length} tokens"
    )
    yield (
        f"units       {units.start} to {units.stop - 1}, of {schedule.unit_length} tokens "
        f"({rows} row{'s' if rows > 1 else ''} each), in micro-batches of {size}"
    )


def _remarks(run: RunFolder, exclusions: Exclusions, step: int) -> Iterator[str]:
    """Why the step changed no weight, where it did not."""
    if step in exclusions.skip:
        yield "left out    data.skip names this step: it passes without an update"
    notes = [record["note"] for record, _ in read_records(run.metrics) if "note" in record]
    skipped = dict.fromkeys(note for note in notes if note.startswith(f"step {step}: skipped"))
    yield from (f"skipped     {note}" for note in skipped)


def _lines(unit: SeenUnit, micro_batch: int) -> Iterator[str]:
    blocked = "  blocked: weighs nothing" if unit.blocked else ""
    yield (
        f"\nunit {unit.index}  micro-batch {micro_batch}  {unit.source} row {unit.row}  "
        f"{', '.join(unit.shards)}{blocked}"
    )
    for document in unit.documents:
        edges = {
            (True, True): "whole",
            (True, False): "begins",
            (False, True): "ends",
            (False, False): "inside",
        }[document.begins, document.ends]
        text = json.dumps(document.text, ensure_ascii=False)
        amount = f"{len(document.tokens):>6} tokens"
        yield f"  document {document.number:<9} {amount}  {edges:<6}  {text}"
