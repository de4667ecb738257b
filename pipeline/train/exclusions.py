"""Data that a run leaves out: `data.skip` (steps), `data.block` (shards), and damaged shards.

Neither moves anything else: a skipped step passes without an update and a blocked shard's units
weigh nothing, each at its place in the plan. Both take effect from the step on at which the run
starts or goes on, and the checkpoint records since when; what lies before cannot be changed.

With `data.on_corrupt=skip` a shard that cannot be read is blocked, too, from the step on that was
the first to need what is damaged; for good, so that a run goes on alike though the file be mended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config import ConfigError, DataConfig, nearest


@dataclass(frozen=True)
class Exclusions:
    """skip: steps without an update. blocks: (step, shards blocked from it on), in order.

    damaged: shards found damaged, each with the first step that went without it.
    """

    skip: tuple[int, ...] = ()
    blocks: tuple[tuple[int, tuple[str, ...]], ...] = ()
    damaged: tuple[tuple[str, int], ...] = ()

    def blocked(self, step: int) -> frozenset[str]:
        """Names of the shards whose units weigh nothing at `step`."""
        current: tuple[str, ...] = ()
        for start, shards in self.blocks:
            if start <= step:
                current = shards
        return frozenset(current) | {shard for shard, start in self.damaged if start <= step}

    def with_damaged(self, shards: Iterable[str], step: int) -> Exclusions:
        """These, and shards found damaged at `step`."""
        known = dict(self.damaged)
        new = tuple((shard, step) for shard in sorted(shards) if shard not in known)
        return replace(self, damaged=self.damaged + new)

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
        return Exclusions(tuple(sorted(past | ahead)), blocks, self.damaged)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the inverse of `from_dict`."""
        return {
            "skip": list(self.skip),
            "block": [[start, list(shards)] for start, shards in self.blocks],
            "damaged": [list(entry) for entry in self.damaged],
        }

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Exclusions:
        blocks = tuple((int(start), tuple(shards)) for start, shards in value["block"])
        damaged = tuple((str(shard), int(start)) for shard, start in value["damaged"])
        return Exclusions(tuple(value["skip"]), blocks, damaged)


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
