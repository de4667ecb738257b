"""Checks of a configuration that need neither torch nor the corpus: ranges, and what must fit."""

from __future__ import annotations

import dataclasses
import re

from pipeline.config.errors import ConfigError, nearest
from pipeline.config.sections import (
    STAGES,
    ClusterConfig,
    Config,
    HardwareConfig,
    PlanConfig,
    StudyConfig,
)

MANIFESTS = ("train", "eval", "cluster")


def validate(config: Config) -> None:
    """Checks between keys that need neither torch nor the corpus. Raises `ConfigError`."""
    train = config.train
    for stage in config.stages:
        if stage not in STAGES:
            raise ConfigError(f"stages: no stage {stage!r}; {nearest(stage, STAGES)}")
    _check_ranges(config)
    _check_nodes(config.cluster)
    _check_choices(config)
    if config.manifest.kind not in MANIFESTS:
        raise ConfigError(
            f"manifest.kind={config.manifest.kind}: {nearest(config.manifest.kind, MANIFESTS)}"
        )
    _check_cluster(config.cluster)
    if train.global_batch % train.micro_batch:
        raise ConfigError(
            f"train.global_batch={train.global_batch} is not a multiple of "
            f"train.micro_batch={train.micro_batch}; the micro-batch is part of the numerics, so "
            "choose a global batch that it divides"
        )
    for name, end in (("first", config.precision.first), ("last", config.precision.last)):
        if not end >= 0 or (end > 1 and not end.is_integer()):
            raise ConfigError(
                f"precision.{name}: a number of blocks, or a share below 1, not {end}"
            )
    profiled = train.profile_steps
    if profiled and not (len(profiled) == 2 and 0 <= profiled[0] <= profiled[1]):
        raise ConfigError(
            f"train.profile_steps={list(profiled)}: give the first and the last step, as [20,24]"
        )
    if not config.data.sources:
        raise ConfigError("data.sources: empty; name at least one source of text")
    if config.study:
        _check_study(config.study)
    shortest = len(config.data.sources) * train.sequence_length
    if train.validation_tokens < shortest:
        raise ConfigError(
            f"train.validation_tokens={train.validation_tokens}: one row of each source takes "
            f"{shortest}"
        )
    if config.data.packing == "best_fit" and config.data.row_length != train.sequence_length:
        raise ConfigError(
            f"data.row_length={config.data.row_length}: best_fit fills rows of "
            f"train.sequence_length={train.sequence_length} tokens; leave the key out"
        )
    for name, source in config.data.sources.items():
        if "" in source.uris:
            raise ConfigError(f"data.sources.{name}.uris: an empty name; give a file or a folder")
        if (source.builtin is None) == (not source.uris):
            raise ConfigError(f"data.sources.{name}: set either builtin=... or uris=[...]")


def _check_choices(config: Config) -> None:
    """Words among which one is chosen. Raises `ConfigError`."""
    choices = {
        "evals.precision": (config.evals.precision, ("bf16", "recipe")),
        "evals.on_missing": (config.evals.on_missing, ("skip", "fail")),
    }
    for key, (word, known) in choices.items():
        if word not in known:
            raise ConfigError(f"{key}={word}: {nearest(word, known)}")
    if config.export.format == "hf" and config.export.calibration is not None:
        raise ConfigError(
            f"export.calibration={config.export.calibration}: format=hf has no activation scales "
            "to measure; leave it out, or export format=nvfp4-compressed-tensors"
        )
    if isinstance(config.step, str) and config.step != "all":
        raise ConfigError(f"step={config.step}: give a step's number, or, to eval, all")


def _check_study(study: StudyConfig) -> None:
    """Names of a study lead to what it has. Raises `ConfigError`."""
    if study.baseline not in study.arms:
        hint = nearest(study.baseline, study.arms)
        raise ConfigError(f"study.baseline={study.baseline}: no such arm; {hint}")
    if not study.sizes:
        raise ConfigError("study.sizes: empty; name at least one, {main: []}")
    for name, arm in study.arms.items():
        path = f"study.arms.{name}"
        for size in arm.sizes:
            if size not in study.sizes:
                raise ConfigError(f"{path}.sizes: no size {size}; {nearest(size, study.sizes)}")
        if not 1 <= arm.num_seeds <= len(study.seeds):
            raise ConfigError(
                f"{path}.num_seeds={arm.num_seeds}: the study has {len(study.seeds)} seeds"
            )
        if (arm.trunk is None) != (arm.fork_at is None):
            raise ConfigError(f"{path}: trunk and fork_at go together")
        if arm.trunk is None:
            continue
        if arm.trunk not in study.arms:
            raise ConfigError(
                f"{path}.trunk={arm.trunk}: no such arm; {nearest(arm.trunk, study.arms)}"
            )
        trunk = study.arms[arm.trunk]
        if trunk.trunk:
            raise ConfigError(f"{path}.trunk={arm.trunk}: that arm is a fork itself")
        main = (next(iter(study.sizes)),)
        sizes, trunk_sizes = set(arm.sizes or main), set(trunk.sizes or main)
        if arm.num_seeds > trunk.num_seeds or not sizes <= trunk_sizes:
            raise ConfigError(f"{path}: it has sizes or seeds that its trunk {arm.trunk} has not")


def _check_cluster(cluster: ClusterConfig) -> None:
    """Workers can be had in these numbers, and copies shared as asked. Raises `ConfigError`."""
    least = cluster.min_workers
    if least is not None and not 1 <= least <= cluster.workers:
        raise ConfigError(
            f"cluster.min_workers={least}: from 1 to cluster.workers={cluster.workers}"
        )
    if cluster.shard and cluster.workers % cluster.shard:
        raise ConfigError(
            f"cluster.shard={cluster.shard} does not divide {cluster.workers} workers; choose a "
            "divisor, or 0 for all of them"
        )


def _check_ranges(config: Config) -> None:
    """Every number lies in its range; not-a-number lies in none. Raises `ConfigError`."""
    train, data, cluster = config.train, config.data, config.cluster
    tiny, huge = 1e-300, 1e300
    ranges: dict[str, tuple[float, float, float]] = {
        "seed": (config.seed, 0, 2**64 - 1),
        "train.tokens": (train.tokens, 1, huge),
        "train.sequence_length": (train.sequence_length, 1, huge),
        "train.global_batch": (train.global_batch, 1, huge),
        "train.micro_batch": (train.micro_batch, 1, huge),
        "train.learning_rate": (train.learning_rate, tiny, huge),
        "train.final_learning_rate": (train.final_learning_rate, 0, huge),
        "train.warmup_tokens": (train.warmup_tokens, 0, huge),
        "train.weight_decay": (train.weight_decay, 0, huge),
        "train.beta1": (train.beta1, 0, 1 - 1e-12),
        "train.beta2": (train.beta2, 0, 1 - 1e-12),
        "train.epsilon": (train.epsilon, 0, huge),
        "train.clip_norm": (train.clip_norm, tiny, huge),
        "train.checkpoint_every_tokens": (train.checkpoint_every_tokens, 0, huge),
        "train.keep_checkpoints": (train.keep_checkpoints, 1, huge),
        "train.validate_every_tokens": (train.validate_every_tokens, 0, huge),
        "train.log_every_steps": (train.log_every_steps, 1, huge),
        "train.statistics_every_steps": (train.statistics_every_steps, 0, huge),
        "train.max_skipped_steps": (train.max_skipped_steps, 0, huge),
        "train.spike_window": (train.spike_window, 4, huge),
        "train.spike_threshold": (train.spike_threshold, 0, huge),
        "train.keep_checkpoints_every_tokens": (train.keep_checkpoints_every_tokens, 0, huge),
        "train.max_checkpoint_failures": (train.max_checkpoint_failures, 1, huge),
        "train.compare_replicas_every_steps": (train.compare_replicas_every_steps, 0, huge),
        "train.hang_timeout_seconds": (train.hang_timeout_seconds, 0, huge),
        "data.holdout_fraction": (data.holdout_fraction, tiny, 1 - 1e-12),
        "data.holdout_max_bytes": (data.holdout_max_bytes, 0, huge),
        "data.shard_tokens": (data.shard_tokens, 1, huge),
        "data.mixture_block": (data.mixture_block, 1, 2**20),
        "data.prefetch_bytes": (data.prefetch_bytes, 1, huge),
        "data.seed": (data.seed, 0, 2**63 - 1),
        "evals.num_questions": (config.evals.num_questions, 1, huge),
        "evals.batch_size": (config.evals.batch_size, 1, huge),
        "evals.max_length": (_given(config.evals.max_length), 2, huge),
        "evals.limit": (_given(config.evals.limit), 1, huge),
        "evals.watch_seconds": (config.evals.watch_seconds, tiny, huge),
        "evals.workers": (config.evals.workers, 0, huge),
        "evals.samples_logged": (config.evals.samples_logged, 0, huge),
        "fidelity.num_batches": (config.fidelity.num_batches, 1, huge),
        "fidelity.num_draws": (config.fidelity.num_draws, 2, 2**20),
        "export.shard_bytes": (config.export.shard_bytes, 1, huge),
        "export.calibration_tokens": (config.export.calibration_tokens, 1, huge),
        "generate.max_new_tokens": (config.generate.max_new_tokens, 1, 2**24),
        "generate.temperature": (config.generate.temperature, 0, huge),
        "generate.top_p": (config.generate.top_p, 1e-9, 1),
        "generate.seed": (config.generate.seed, 0, 2**32),
        "cluster.workers": (cluster.workers, 0, huge),
        "cluster.cpus_per_worker": (cluster.cpus_per_worker, 0, huge),
        "cluster.gpus_per_worker": (cluster.gpus_per_worker, 0, 1),  # a worker drives one device
        "cluster.max_failures": (cluster.max_failures, -1, huge),
        "cluster.resize_seconds": (cluster.resize_seconds, 0, huge),
        "cluster.nodes": (cluster.nodes, 1, huge),
        "cluster.gpus_per_node": (cluster.gpus_per_node, 0, huge),
        **_plan_ranges(config.plan),
        **_hardware_ranges(cluster.hardware),
        "cluster.shard": (cluster.shard, 0, huge),
    }
    if config.study:
        ranges["study.window"] = (config.study.window, 1e-6, 1)
        ranges["study.effect"] = (config.study.effect, 1e-6, 1)
        ranges["study.parallel"] = (config.study.parallel, 1, 1024)
    for name, source in data.sources.items():
        if source.max_bytes is not None:
            ranges[f"data.sources.{name}.max_bytes"] = (source.max_bytes, 1, huge)
        if source.max_chars is not None:
            least = source.min_chars or 1
            ranges[f"data.sources.{name}.max_chars"] = (source.max_chars, least, huge)
    for name, (number, low, high) in ranges.items():
        if not low <= number <= high:
            bound = f"at least {low:g}" if high == huge else f"between {low:g} and {high:g}"
            raise ConfigError(f"{name}: must be {bound}, got {number}")
    names = {"data.name": data.name} | ({"name": config.name} if config.name else {})
    for key, name in names.items():
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            raise ConfigError(
                f"{key}={name!r}: it names a folder; use letters, digits, '.', '_' and '-'"
            )
    if config.name in {"data", "latest", "mlartifacts"}:
        raise ConfigError(f"name={config.name}: taken for other things; choose another")


def _given(number: float | None) -> float:
    """A number that may be left out; what lies in every range where it is."""
    return 2 if number is None else number


def _hardware_ranges(hardware: HardwareConfig | None) -> dict[str, tuple[float, float, float]]:
    """A card may lack a format, but nothing else."""
    if hardware is None:
        return {}
    if len(hardware.capability) != 2:
        raise ConfigError(
            f"cluster.hardware.capability={list(hardware.capability)}: give two numbers, [10, 0]"
        )
    least = {"fp8_tflops": 0, "fp4_tflops": 0, "nvlink_gpus": 1}
    if tuple(hardware.capability) >= (8, 9):  # since when tensor cores take 8 bits
        del least["fp8_tflops"]
    if tuple(hardware.capability) >= (10, 0):
        del least["fp4_tflops"]
    return {
        f"cluster.hardware.{key}": (number, least.get(key, 1e-3), 1e300)
        for key, number in dataclasses.asdict(hardware).items()
        if key not in {"name", "capability"}
    }


def _plan_ranges(plan: PlanConfig) -> dict[str, tuple[float, float, float]]:
    shares = {f"plan.gemm_efficiency.{name}": share for name, share in plan.gemm_efficiency.items()}
    shares |= {
        f"plan.{name}": getattr(plan, name)
        for name in (
            "attention_efficiency",
            "scan_efficiency",
            "quantization_efficiency",
            "memory_efficiency",
            "network_efficiency",
        )
    }
    ranges: dict[str, tuple[float, float, float]] = {
        name: (share, 1e-3, 1) for name, share in shares.items()
    }
    ranges["plan.overlap"] = (plan.overlap, 0, 1)
    ranges["plan.reserved_gb"] = (plan.reserved_gb, 0, 1e300)
    ranges["plan.price"] = (plan.price or 0, 0, 1e300)
    for source, tokens in (plan.corpus_tokens or {}).items():
        ranges[f"plan.corpus_tokens.{source}"] = (tokens, 1, 1e300)
    return ranges


def _check_nodes(cluster: ClusterConfig) -> None:
    """Nodes, where they are given, hold just the workers."""
    if not cluster.gpus_per_node:
        return
    gpus = cluster.nodes * cluster.gpus_per_node
    if cluster.gpus_per_node % max(cluster.gpus_per_worker, 1):
        raise ConfigError(
            f"cluster.gpus_per_worker={cluster.gpus_per_worker} does not divide "
            f"cluster.gpus_per_node={cluster.gpus_per_node}"
        )
    if cluster.workers * cluster.gpus_per_worker != gpus:
        raise ConfigError(
            f"cluster.workers={cluster.workers} of {cluster.gpus_per_worker} GPUs: "
            f"{cluster.nodes} nodes of {cluster.gpus_per_node} have {gpus}; give cluster.nodes "
            "and leave cluster.workers out"
        )
