"""Which runs a study has: every arm at its sizes and seeds, each a configuration of its own.

A run's name ends with the beginning of its configuration's fingerprint. So a finished run is found
again by name, an interrupted one goes on, and a change of any key that decides weights is another
run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.config import ArmConfig, Config, ConfigError, StudyConfig, digest, from_dict
from pipeline.train.schedule import Schedule

Compose = Callable[[list[str]], dict[str, Any]]  # Hydra's overrides to a whole configuration


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: arm, size and seed, with all that `pipeline run` is told.

    configuration: fingerprint of what decides its weights, wherever its files lie.
    fork: the step at which it leaves its trunk's run; None for one with weights of its own.
    """

    arm: str
    size: str
    seed: int
    name: str
    overrides: tuple[str, ...]
    config: Config
    configuration: str
    trunk: str | None = None
    fork: int | None = None


def plan_study(study: StudyConfig, compose: Compose, user: list[str]) -> list[StudyRun]:
    """All runs: size after size, seed after seed, trunks before what is forked from them.

    So a study that is interrupted has compared all arms on the seeds that it came to.

    Args:
        compose: makes a configuration of overrides.
        user: the overrides of the command line, which all runs share and which win.

    Raises:
        ConfigError: for an arm whose configuration is refused; it names the arm. For two runs that
            are the same, as under `seed=` on the command line: their noise would be none.
    """
    planned: dict[tuple[str, str, int], StudyRun] = {}
    for name, arm in sorted(study.arms.items(), key=lambda item: item[1].trunk is not None):
        for size in arm.sizes or (next(iter(study.sizes)),):
            for seed in study.seeds[: arm.num_seeds]:
                overrides = (
                    *study.overrides, *study.sizes[size], *arm.overrides, f"seed={seed}",
                    "stages=[prepare,train,eval]", *user,
                )  # fmt: skip
                trunk = planned[arm.trunk, size, seed] if arm.trunk else None
                try:
                    planned[name, size, seed] = _run(
                        study, name, arm, size, seed, overrides, compose, trunk
                    )
                except ConfigError as error:
                    raise ConfigError(f"study.arms.{name} at size {size}: {error}") from error
    first: dict[str, StudyRun] = {}
    for run in planned.values():
        other = first.setdefault(run.config.fingerprint(), run)
        if other is not run:
            raise ConfigError(
                f"study: {other.name} and {run.name} are the same run; a study's arms, sizes and "
                "seeds must differ, also under what the command line says"
            )
    places = list(study.sizes)
    return sorted(planned.values(), key=lambda run: (places.index(run.size), run.seed))


def _run(
    study: StudyConfig,
    name: str,
    arm: ArmConfig,
    size: str,
    seed: int,
    overrides: tuple[str, ...],
    compose: Compose,
    trunk: StudyRun | None,
) -> StudyRun:
    fork = None
    if trunk:
        fork = _fork_step(trunk.config, str(arm.fork_at))
        overrides = (*overrides, f"train.fork_from={trunk.name}@{fork}")
    config = from_dict(compose(list(overrides)))
    if config.train.log_every_steps != 1:
        raise ConfigError("train.log_every_steps: a study pairs every step's loss; set it to 1")
    run = f"{study.name}-{size}-{name}-s{seed}-{config.fingerprint()[:8]}"
    return StudyRun(
        arm=name,
        size=size,
        seed=seed,
        name=run,
        overrides=(*overrides, f"name={run}"),
        config=dataclasses.replace(config, name=run),
        configuration=_configuration(config, trunk, fork),
        trunk=trunk.name if trunk else None,
        fork=fork,
    )


def _configuration(config: Config, trunk: StudyRun | None, fork: int | None) -> str:
    """A fingerprint of all but where the corpus lies, which its content hash stands for.

    With the kind of device, which decides what activations are in.
    """
    decisive = config.decisive()
    for source in decisive["data"]["sources"].values():
        source.pop("uris")
    decisive["data"]["tokenizer"].pop("path")
    decisive["data"].pop("decontaminate")
    if trunk:
        decisive["train"]["fork_from"] = f"{trunk.configuration}@{fork}"
    return digest([decisive, config.cluster.gpus_per_worker > 0])[:16]


def _fork_step(config: Config, start: str) -> int:
    """The first step of the phase that begins there. Raises `ConfigError` where none does."""
    schedule = Schedule.of(config.train, tuple(config.data.sources))
    for phase, resolved in zip(config.train.phases, schedule.phases, strict=True):
        if str(phase.start) == start:
            return resolved.start_step
    starts = ", ".join(str(phase.start) for phase in config.train.phases)
    raise ConfigError(
        f"fork_at={start}: its trunk keeps a checkpoint where a phase begins, at {starts}; "
        "choose one of these, or begin a phase there"
    )
