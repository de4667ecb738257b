"""Where a run comes from: `train.fork_from=<run>@<step>` starts it from another's whole state.

A child goes on from its parent's checkpoint with its own configuration: more tokens, a decay begun
earlier, another blend or recipe. Before the fork its schedule is the parent's, so that the order of
data goes on where the parent stood; from there on the child's own phases hold, their starts counted
in tokens of the whole run. `lineage.json` in the child's folder says all this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.config import AROUND_A_RUN, Config, ConfigError, differences
from pipeline.runs import RunFolder, find_run, list_runs, load_config, root_folder, write_whole
from pipeline.train import checkpoint
from pipeline.train.schedule import Past, Phase, Schedule

FILE = "lineage.json"
FIXED = (  # what gives a step its units, and the weights their shapes
    "train.sequence_length",
    "train.global_batch",
    "data.seed",
    "data.mixture_block",
)


@dataclass(frozen=True)
class Lineage:
    """A child's tie to its parent.

    parent: run id. step: of the parent's checkpoint. tokens: trained until then. checkpoint: its
    folder. difference: keys of the configuration as "key (parent's then, child's now)". past: the
    parent's phases until `step`.
    """

    parent: str
    step: int
    tokens: int
    checkpoint: str
    difference: tuple[str, ...]
    past: tuple[Phase, ...]
    past_fingerprint: str
    mlflow_parent: str | None = None

    @property
    def schedule_past(self) -> Past:
        """What the child's schedule begins with."""
        return Past(self.step, self.past, self.past_fingerprint)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return json.loads(json.dumps(asdict(self)))

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Lineage:
        past = tuple(Phase(**phase) for phase in value["past"])
        return Lineage(**{**value, "difference": tuple(value["difference"]), "past": past})


def lineage_of(run: RunFolder) -> Lineage | None:
    """A run's lineage; None for one that began from fresh weights."""
    file = run.path / FILE
    return Lineage.from_dict(json.loads(file.read_text())) if file.is_file() else None


def write_lineage(run: RunFolder, lineage: Lineage) -> None:
    write_whole(run.path / FILE, json.dumps(lineage.to_dict(), indent=1))


def schedule_of(config: Config, run: RunFolder | None) -> Schedule:
    """The schedule of a run, its parent's past included. Raises `ConfigError`."""
    lineage = lineage_of(run) if run else None
    past = lineage.schedule_past if lineage else None
    return Schedule.of(config.train, tuple(config.data.sources), past)


def fork(config: Config) -> Lineage:
    """Resolve `train.fork_from`. Reads the parent's files only.

    Raises `ConfigError` for an unknown run or step, or a configuration that cannot go on from it.
    """
    wanted = str(config.train.fork_from)
    name, at, step = wanted.rpartition("@")
    if not at or not step.isdigit():
        raise ConfigError(f"train.fork_from={wanted}: give <run>@<step>")
    parent = find_run(root_folder(config), name)
    try:
        found = checkpoint.at_step(parent.checkpoints, int(step))
    except checkpoint.CheckpointError as error:
        raise ConfigError(f"train.fork_from={wanted}: {error}") from error
    parent_config = load_config(parent)
    then, now = parent_config.to_dict(), config.to_dict()
    found_differences = differences(then, now, AROUND_A_RUN)
    for difference in found_differences:
        if difference.startswith((*FIXED, "model.")):
            raise ConfigError(
                f"train.fork_from={wanted}: a child keeps its parent's {', '.join(FIXED)} and "
                f"model, but {difference}"
            )
    schedule = schedule_of(parent_config, parent)
    lineage = Lineage(
        parent=parent.id,
        step=found.step,
        tokens=found.step * schedule.tokens_per_step,
        checkpoint=str(found.path),
        difference=tuple(d for d in found_differences if not d.startswith("train.fork_from")),
        past=schedule.until(found.step),
        past_fingerprint=schedule.fingerprint(found.step),
        mlflow_parent=_mlflow_run(parent),
    )
    Schedule.of(config.train, tuple(config.data.sources), lineage.schedule_past)
    return lineage


def family(run: RunFolder) -> list[tuple[RunFolder, Lineage | None]]:
    """The run's first ancestor and all that descend from it, parents before children."""
    lineages = {item.id: (item, lineage_of(item)) for item in list_runs(run.path.parent)}
    root = run.id
    while (lineage := lineages[root][1]) and lineage.parent in lineages:
        root = lineage.parent
    members = [lineages[root]]
    for member, _ in members:  # grows while it is walked
        members += [
            (item, lineage)
            for item, lineage in lineages.values()
            if lineage and lineage.parent == member.id
        ]
    return members


def _mlflow_run(run: RunFolder) -> str | None:
    file = Path(run.path / "tracking.json")
    return json.loads(file.read_text())["run_id"] if file.is_file() else None
