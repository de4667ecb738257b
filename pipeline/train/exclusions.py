"""Data that a run was told to leave out: `data.skip` (steps) and `data.block` (shards).

Neither moves anything else: a skipped step passes without an update and a blocked shard's units
weigh nothing, each at its place in the plan. Both take effect from the step on at which the run
starts or goes on, and the checkpoint records since when; what lies before cannot be changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config import ConfigError, DataConfig, nearest


@dataclass(frozen=True)
class Exclusions:
    """skip: steps without an update. blocks: (step, shards blocked from it on), in order."""

    skip: tuple[int, ...] = ()
    blocks: tuple[tuple[int, tuple[str, ...]], ...] = ()

    def blocked(self, step: int) -> frozenset[str]:
        """Names of the shards whose units weigh nothing at `step`."""
        current: tuple[str, ...] = ()
        for start, shards in self.blocks:
            if start <= step:
                current = shards
        return frozenset(current)

    def resumed(self, data: DataConfig, step: int, *, fork_step: int = 0) -> Exclusions:
        """These until `step`, the configuration's from there on.

        fork_step: where the run left its parent, whose past it takes as it is. Raises `ConfigError`
        where the configuration adds or leaves out a step that this run has done already.
        """
        past = {number for number in self.skip if number < step}
        wanted = {number for number in data.skip if number < step}
        changed = [number for number in sorted(past ^ wanted) if number >= fork_step]
        if changed:
            names = ", ".join(str(number) for number in changed)
            raise ConfigError(
                f"data.skip: step {names} is done, the run goes on at step {step}, so it cannot "
                f"{'be left out any more' if changed[0] in wanted else 'be taken back'}; give the "
                "list as it was, or fork from a checkpoint before: train.fork_from=<run>@<step>"
            )
        blocks = tuple(entry for entry in self.blocks if entry[0] < step)
        shards = tuple(sorted(data.block))
        if shards != (blocks[-1][1] if blocks else ()):
            blocks = (*blocks, (step, shards))
        ahead = {number for number in data.skip if number >= step}
        return Exclusions(tuple(sorted(past | ahead)), blocks)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the inverse of `from_dict`."""
        return {
            "skip": list(self.skip),
            "block": [[start, list(shards)] for start, shards in self.blocks],
        }

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Exclusions:
        blocks = tuple((int(start), tuple(shards)) for start, shards in value["block"])
        return Exclusions(tuple(value["skip"]), blocks)


def check(data: DataConfig, shards: set[str], num_steps: int) -> None:
    """Whether what is to be left out exists. Raises `ConfigError`.

    shards: file names of all training shards.
    """
    for number in data.skip:
        if not 0 <= number < num_steps:
            raise ConfigError(f"data.skip: no step {number}; the run's are 0 to {num_steps - 1}")
    for name in data.block:
        if name not in shards:
            raise ConfigError(
                f"data.block: the corpus has no shard {name!r}; {nearest(name, shards)}"
            )
