"""What a configuration will take: the formulas applied to it, and to other cards and recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from model import ModelConfig, count_parameters, flops_per_token
from model.loss import SLICE_ELEMENTS
from pipeline.config import Config, ConfigError, HardwareConfig, from_dict, nearest
from pipeline.config.build import build
from pipeline.help import CONF
from pipeline.plan import formulas
from pipeline.plan.formulas import Batch, Layout, Work
from pipeline.plan.linears import Kinds, Linear, gemms, kinds_of, linears_of, named_precision
from pipeline.train.schedule import Phase, Schedule

CARDS = ("b200", "gb200", "gb300", "h100", "h200")
RECIPES = ("bf16", "mxfp8", "mxfp4", "nvfp4", "nvfp4_paper")
MOST_NODES = 1024  # that `nodes=auto` tries


@dataclass(frozen=True)
class Estimate:
    """The plan of one configuration. Bytes and seconds; a GPU's where nothing else is said."""

    parameters: Mapping[str, int]
    forward_flops: Mapping[str, int]  # of a token
    training_flops: float  # of a token, recomputation counted
    precision_shares: Mapping[str, float]  # of the GEMMs' operations over the whole run
    layout: Layout
    micro_batches: int  # a GPU and step
    idle: float  # share of the GPUs' time in which a step has no micro-batch for them
    memory: Mapping[str, Mapping[str, float]]  # by activation checkpointing, then category
    checkpoints: int
    checkpoints_kept: int
    checkpoint_bytes: int
    sent: Mapping[str, float]  # bytes a step, by collective
    corpus: Mapping[str, float]  # tokens wanted of each source


def shape_of(config: Config) -> ModelConfig:
    """The model's shape. Raises `ConfigError` where it is impossible."""
    try:
        return ModelConfig.from_dict(dataclasses.asdict(config.model))
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error


def layout_of(config: Config) -> Layout:
    """How training lays parameters over workers (`cluster.shard`, where 0 is all of them)."""
    workers = max(config.cluster.workers, 1)
    shards = min(config.cluster.shard or workers, workers)
    gather, each = config.cluster.fp4_gather, config.cluster.scatter_each_micro_batch
    return Layout(workers // shards, shards, gather, each, config.train.reproducible)


def batch_of(config: Config, length: int) -> Batch:
    """A micro-batch where the workers are: BF16 and fused kernels on GPUs, FP32 torch on CPUs."""
    rows = config.train.micro_batch * config.train.sequence_length // length
    on_gpu = config.cluster.gpus_per_worker > 0
    chunk = min(config.model.mamba_chunk_size, max(32, min(64, config.model.mamba_state_size)))
    return Batch(rows, length, 2 if on_gpu else 4, fused=on_gpu, chunk=min(chunk, length))


def estimate(config: Config) -> Estimate:
    """The plan. Raises `ConfigError` for what cannot be run."""
    shape, schedule = shape_of(config), Schedule.of(config.train, tuple(config.data.sources))
    linears = linears_of(config)
    layout, micro_batches = layout_of(config), config.train.global_batch // config.train.micro_batch
    if layout.gpus > micro_batches:
        raise ConfigError(
            f"cluster: {layout.gpus} workers for the {micro_batches} micro-batches of a step "
            f"(train.global_batch={config.train.global_batch} / train.micro_batch="
            f"{config.train.micro_batch}); take at most {micro_batches} workers"
        )
    each = _micro_batches(config)
    parameters = count_parameters(shape)
    longest = batch_of(config, config.train.sequence_length)
    forward = flops_per_token(shape, config.train.sequence_length)
    by_name = {linear.name: linear for linear in linears}
    memory = {
        kind: formulas.memory(shape, by_name, parameters["total"], longest, kind, layout)
        for kind in ("none", "selective", "full")
    }
    saved, kept = _checkpoints(config, schedule)
    corpus: dict[str, float] = {}
    for phase in schedule.phases:
        for source, share in phase.blend.items():
            tokens = (phase.end_step - phase.start_step) * schedule.tokens_per_step
            corpus[source] = corpus.get(source, 0) + share * tokens
    for source in config.plan.corpus_tokens or {}:
        if source not in corpus:
            hint = nearest(source, corpus)
            raise ConfigError(f"plan.corpus_tokens.{source}: no such source; {hint}")
    return Estimate(
        parameters=parameters,
        forward_flops=forward,
        training_flops=formulas.training_flops(
            forward, config.train.activation_checkpointing, _sliced(longest, shape)
        ),
        precision_shares=_precision_shares(linears, schedule),
        layout=layout,
        micro_batches=each,
        idle=1 - micro_batches / (each * layout.gpus),
        memory=memory,
        checkpoints=saved,
        checkpoints_kept=kept,
        checkpoint_bytes=formulas.checkpoint_bytes(parameters["total"]),
        sent=_sent(config, kinds_of(linears), "recipe"),
        corpus=corpus,
    )


def fits(config: Config, made: Estimate) -> bool:
    """Whether a GPU's memory holds the step."""
    hardware = config.cluster.hardware
    return hardware is None or peak_bytes(config, made) <= hardware.memory_gb * 1e9


def peak_bytes(config: Config, made: Estimate) -> float:
    """The most that a GPU holds as configured, what is reserved included."""
    held = made.memory[config.train.activation_checkpointing]
    return formulas.peak(held) + config.plan.reserved_gb * 1e9


def smallest(raw: Mapping[str, Any]) -> Config:
    """The configuration with the fewest nodes that fit. Raises `ConfigError` where none do.

    raw: composed, with `cluster.nodes` "auto".
    """
    why = "no number of nodes was tried"
    for nodes in range(1, MOST_NODES + 1):
        cluster = {**raw["cluster"], "nodes": nodes}
        try:
            config = from_dict({**raw, "cluster": cluster})
            made = estimate(config)
        except ConfigError as error:
            why = str(error)
            if "does not divide" in why:
                continue
            break
        if fits(config, made):
            return config
        why = (
            f"{peak_bytes(config, made) / 1e9:,.0f} GB a GPU on {nodes} nodes, which have "
            f"{config.cluster.hardware.memory_gb:g}"  # type: ignore[union-attr]
        )
        if made.layout.shards == 1:
            why += "; every GPU holds all weights, so more nodes do not help: set cluster.shard"
            break
    raise ConfigError(f"nodes=auto: nothing fits: {why}")


@cache
def card(name: str) -> HardwareConfig:
    """The GPU of a file in conf/cluster."""
    raw = yaml.safe_load((CONF / "cluster" / f"{name}.yaml").read_text())
    hardware = build(HardwareConfig, raw["hardware"], f"{name}.hardware")
    assert isinstance(hardware, HardwareConfig)
    return hardware


def run_seconds(config: Config, hardware: HardwareConfig, kinds: Kinds) -> dict[str, float]:
    """The whole run's seconds by what they are spent on, phase by phase."""
    schedule = Schedule.of(config.train, tuple(config.data.sources))
    shape, layout = shape_of(config), layout_of(config)
    parameters = count_parameters(shape)["total"]
    total: dict[str, float] = {}
    for steps, phase in _distinct(schedule):
        communicating = formulas.communication_seconds(
            _sent(config, kinds, phase.precision), layout, hardware, config.plan.network_efficiency
        )
        work = Work(
            shape=shape,
            kinds=kinds,
            tokens=config.train.micro_batch * config.train.sequence_length,
            length=phase.sequence_length,
            micro_batches=_micro_batches(config),
            mode=phase.precision,
            checkpointing=config.train.activation_checkpointing,
            parameters=parameters / layout.shards,
        )
        spent = formulas.step_seconds(work, hardware, config.plan, communicating)
        for name, seconds in spent.items():
            total[name] = total.get(name, 0) + steps * seconds
    return total


def at_peak(config: Config) -> Config:
    """The same with nothing lost: every efficiency 1 and all communication hidden."""
    plan = dataclasses.replace(
        config.plan,
        gemm_efficiency=dict.fromkeys(config.plan.gemm_efficiency, 1.0),
        attention_efficiency=1.0,
        scan_efficiency=1.0,
        quantization_efficiency=1.0,
        memory_efficiency=1.0,
        network_efficiency=1.0,
        overlap=1.0,
    )
    return dataclasses.replace(config, plan=plan)


def comparison(config: Config) -> Iterator[tuple[HardwareConfig, str, dict[str, float]]]:
    """(card, recipe, seconds of the run) of every card and recipe, with as many GPUs."""
    kinds = {recipe: kinds_of(linears_of(config, recipe)) for recipe in RECIPES}
    for name in CARDS:
        for recipe in RECIPES:
            yield card(name), recipe, run_seconds(config, card(name), kinds[recipe])


def _sliced(batch: Batch, shape: ModelConfig) -> bool:
    return batch.tokens * shape.vocab_size > SLICE_ELEMENTS


def _micro_batches(config: Config) -> int:
    """Of the GPU that has most of them, in a step."""
    return -(-(config.train.global_batch // config.train.micro_batch) // layout_of(config).gpus)


def _sent(config: Config, kinds: Kinds, mode: str) -> dict[str, float]:
    """Bytes a step by collective, in a mode of the recipe."""
    shape, layout = shape_of(config), layout_of(config)
    parameters = count_parameters(shape)["total"]
    gathered = formulas.gathered_bytes(shape, kinds, parameters, layout, mode)
    return formulas.communication(parameters, gathered, layout, _micro_batches(config))


def _distinct(schedule: Schedule) -> list[tuple[int, Phase]]:
    """Steps of each kind of phase: only row length and precision change what a step takes."""
    steps: dict[tuple[int, str], tuple[int, Phase]] = {}
    for phase in schedule.phases:
        key = (phase.sequence_length, phase.precision)
        before = steps.get(key, (0, phase))[0]
        steps[key] = (before + phase.end_step - phase.start_step, phase)
    return list(steps.values())


def _precision_shares(linears: tuple[Linear, ...], schedule: Schedule) -> dict[str, float]:
    flops: dict[str, float] = {}
    for steps, phase in _distinct(schedule):
        for linear, count in kinds_of(linears):
            for gemm in gemms(linear, 1, phase.precision):
                name = named_precision(gemm)
                flops[name] = flops.get(name, 0) + steps * count * gemm.flops
    return {name: flops[name] / sum(flops.values()) for name in sorted(flops)}


def _checkpoints(config: Config, schedule: Schedule) -> tuple[int, int]:
    """How many are written, and how many stay at the end."""
    train, tokens = config.train, schedule.num_steps * schedule.tokens_per_step
    boundaries = len(schedule.boundaries())

    def due(every: int) -> int:
        return tokens // every if every else 0

    ends_on_one = bool(train.checkpoint_every_tokens) and not (
        tokens % train.checkpoint_every_tokens
    )
    written = due(train.checkpoint_every_tokens) + boundaries + (not ends_on_one)
    kept = train.keep_checkpoints + boundaries + due(train.keep_checkpoints_every_tokens)
    return written, min(kept, written)
