"""Checks before any work: everything that can be known to be missing is told at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.config import Config, ConfigError, UnreachableError
from pipeline.data.prepare import check as check_data
from pipeline.data.tokenizer import load_tokenizer, vocab_size_of
from pipeline.runs import RunFolder, root_folder

MINIMUM_FREE_BYTES = 500_000_000


def check(config: Config, stages: tuple[str, ...], run: RunFolder | None = None) -> None:
    """Raise one `ConfigError` that lists all that is wrong or missing for these stages.

    run: the one to go on with; None for a fresh one.
    """
    problems = [
        *_caught(lambda: _check_root(root_folder(config))),
        *_caught(lambda: check_data(config.data)),
        *_caught(lambda: _check_vocabulary(config)),
        *_caught(lambda: _check_tasks(config)),
        *_caught(lambda: _check_schedule(config, run)),
        *_caught(lambda: _check_warm_start(config, run)),
        *_caught(lambda: _check_compiler(config)),
    ]
    if "train" in stages and not problems:
        problems += _caught(lambda: _check_precision(config, run))
    away = list(_hardware_problems(config)) if "train" in stages else []
    if problems or away:
        kind = ConfigError if problems else UnreachableError
        raise kind("this run cannot start:\n  - " + "\n  - ".join([*problems, *away]))


def _caught(checker: Callable[[], None]) -> list[str]:
    try:
        checker()
    except ConfigError as error:
        return [str(error)]
    return []


def _check_root(root: Path) -> None:
    """The output folder can be made and written, and its disk has room."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"root={root}: cannot be written ({error.strerror}); choose another with root=..."
        ) from error
    free = shutil.disk_usage(root).free
    if free < MINIMUM_FREE_BYTES:
        raise ConfigError(
            f"root={root}: {free / 1e9:.2f} GB free, a run needs at least "
            f"{MINIMUM_FREE_BYTES / 1e9:.1f} GB; free some or choose another with root=..."
        )


def _check_schedule(config: Config, run: RunFolder | None) -> None:
    from pipeline.train.schedule import Schedule

    if config.train.fork_from:
        from pipeline.lineage import fork, schedule_of

        if run:
            schedule_of(config, run)
        else:
            fork(config)
    else:
        Schedule.of(config.train, tuple(config.data.sources))


def _check_warm_start(config: Config, run: RunFolder | None) -> None:
    """The weights that a fresh run is to begin with fit its model."""
    if not config.train.init_from:
        return
    if config.train.fork_from:
        raise ConfigError(
            "train.init_from and train.fork_from: a child has its parent's weights; give one"
        )
    if run is None:
        from pipeline.warm_start import find_source

        find_source(config)


def _check_vocabulary(config: Config) -> None:
    tokenizer = config.data.tokenizer
    path = tokenizer.path
    size = vocab_size_of(load_tokenizer(path)) if path else tokenizer.vocab_size
    if config.model.vocab_size < size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the tokenizer's {size}"
        )


def _check_tasks(config: Config) -> None:
    """Every task is one of ours, whose file is there, or one that the harness knows."""
    if "eval" not in config.stages:
        return
    from pipeline.evaluation.measure import check_tasks

    check_tasks(config.evals)


def _check_precision(config: Config, run: RunFolder | None) -> None:
    """The model's shapes and the recipe fit, found on a model without memory; so do checkpoints."""
    import torch

    from pipeline.train.build import build_model, build_recipe
    from quant import apply_recipe

    try:
        with torch.device("meta"):
            model = build_model(config, torch.device("meta"))
        need = 12 * sum(p.numel() for p in model.parameters()) * (1 + config.train.keep_checkpoints)
        have = (
            sum(f.stat().st_size for f in run.checkpoints.rglob("*") if f.is_file()) if run else 0
        )
        free = shutil.disk_usage(root_folder(config)).free
        if free + have < need:
            raise ConfigError(
                f"root: {free / 1e9:.2f} GB free, {config.train.keep_checkpoints} checkpoints and "
                f"one being written take {need / 1e9:.2f} GB"
                + (f", of which {have / 1e9:.2f} GB are there" if have else "")
                + "; free some, or choose another root=..."
            )
        apply_recipe(
            model, build_recipe(config), num_blocks=len(config.model.pattern), seed=config.seed
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"model or precision: {error}") from error


def _check_compiler(config: Config) -> None:
    """`train.compile` finds the compiler that it needs."""
    if config.train.compile and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise ConfigError(
            "train.compile=true needs a C++ compiler on PATH (c++, g++ or clang++); install one, "
            "or train with train.compile=false"
        )


def _hardware_problems(config: Config) -> Iterator[str]:
    """What the cluster section names and this machine cannot reach."""
    from pipeline.ray_session import local_cpus, missing_resources, resources_at

    cluster = config.cluster
    workers = max(cluster.workers, 1)
    kind = f"with {cluster.gpus_per_worker} {cluster.accelerator or ''} GPU".replace("  ", " ")
    wanted = f"{workers} workers {kind if cluster.gpus_per_worker else 'on CPUs'}"
    if cluster.address:
        available = resources_at(cluster.address)
        if available is not None:
            yield from missing_resources(cluster, available)
        else:
            yield (
                f"cluster: {wanted} are asked for, but no Ray cluster answers at "
                f"cluster.address={cluster.address}; start this on the cluster's head, or choose "
                "cluster=local"
            )
        return
    if not cluster.gpus_per_worker:
        if not os.environ.get("RAY_ADDRESS"):  # a local Ray will be started
            yield from missing_resources(cluster, {"CPU": local_cpus()})
        return
    import torch

    if torch.cuda.device_count() < workers * cluster.gpus_per_worker:
        yield (
            f"cluster: {wanted} are asked for, this machine has {torch.cuda.device_count()}; "
            "choose cluster=local or name a Ray cluster with cluster.address"
        )
