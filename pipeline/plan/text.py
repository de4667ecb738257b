"""The plan as text: what `pipeline plan` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from pipeline.config import Config
from pipeline.plan import estimate, formulas
from pipeline.plan.estimate import Estimate
from pipeline.plan.linears import kinds_of, linears_of
from pipeline.train.schedule import Schedule

DAY = 86_400.0


def describe(config: Config) -> list[str]:
    """The whole plan. Raises `ConfigError` for what cannot be run."""
    made = estimate.estimate(config)
    return [
        *_model(config, made),
        *_schedule(config, made),
        *_memory(config, made),
        *_corpus(config, made),
        *_time(config, made),
        *_comparison(config),
        *_assumptions(config),
    ]


def _model(config: Config, made: Estimate) -> list[str]:
    flops, kinds = made.forward_flops, made.parameters
    shares = ", ".join(
        f"{name.upper()} {share:.1%}" for name, share in made.precision_shares.items()
    )
    by_kind = ", ".join(
        f"{kind} {value / flops['total']:.1%}"
        for kind, value in flops.items()
        if kind != "total" and value
    )
    return [
        f"plan of {config.experiment or 'this configuration'}, recipe {config.precision.recipe}",
        "",
        f"model        {_number(kinds['total'])} parameters: "
        + ", ".join(f"{k} {_number(v)}" for k, v in kinds.items() if k != "total" and v),
        f"FLOPs        {_number(made.training_flops)} a token in training (forward "
        f"{_number(flops['total'])}, recomputation counted); forward: {by_kind}",
        f"GEMM FLOPs   {shares} (of the linears, as the recipe has them)",
    ]


def _schedule(config: Config, made: Estimate) -> list[str]:
    schedule = Schedule.of(config.train, tuple(config.data.sources))
    layout, size = made.layout, made.checkpoint_bytes
    idle = f", {made.idle:.1%} of the GPUs' time idle: they do not divide them" * (made.idle > 0)
    where = f"{layout.replicas} replicas x {layout.shards} shards"
    workers = f"{config.cluster.nodes} nodes, " * bool(config.cluster.gpus_per_node)
    sent = " + ".join(f"{name} {_bytes(value)}" for name, value in made.sent.items())
    return [
        f"steps        {schedule.num_steps:,} of {schedule.global_batch:,} sequences, "
        f"{_number(schedule.tokens_per_step)} tokens; {_number(config.train.tokens)} tokens in "
        f"{len(schedule.phases)} phases",
        f"workers      {workers}{layout.gpus:,} workers: {where}, {made.micro_batches} "
        f"micro-batches a step each{idle}",
        f"sent         {sent or 'nothing'}, by each worker and step",
        f"checkpoints  {made.checkpoints:,} of {_bytes(size)}, {_bytes(made.checkpoints * size)} "
        f"written; {made.checkpoints_kept:,} stay: {_bytes(made.checkpoints_kept * size)}",
    ]


def _memory(config: Config, made: Estimate) -> list[str]:
    configured = config.train.activation_checkpointing
    header = ["memory a worker", *(f"{k} *" if k == configured else k for k in made.memory)]
    rows = [
        [name, *(_bytes(held[name]) for held in made.memory.values())]
        for name in made.memory[configured]
    ]
    reserved = config.plan.reserved_gb * 1e9 if config.cluster.hardware else 0
    peaks = [formulas.peak(held) + reserved for held in made.memory.values()]
    if reserved:
        rows.append(["reserved (assumed)", *(_bytes(reserved) for _ in peaks)])
    rows.append(["at most at once", *map(_bytes, peaks)])
    lines = ["", *_table(header, rows), "* activation checkpointing as configured"]
    hardware = config.cluster.hardware
    if hardware is None:
        return lines
    verdicts = ", ".join(
        f"{kind}: {'fits' if used <= hardware.memory_gb * 1e9 else 'does not fit'}"
        for kind, used in zip(made.memory, peaks, strict=True)
    )
    lines.append(f"{hardware.name} has {hardware.memory_gb:g} GB: {verdicts}")
    if not estimate.fits(config, made):
        way = (
            "every worker holds all weights: cluster.shard=8 shares a copy among 8"
            if made.layout.shards == 1
            else "a larger cluster.shard, a smaller train.micro_batch or more checkpointing"
        )
        lines.append(f"DOES NOT FIT as configured; {way}")
    return lines


def _corpus(config: Config, made: Estimate) -> list[str]:
    known = config.plan.corpus_tokens or {}
    parts = []
    for source, tokens in made.corpus.items():
        epochs = f" ({tokens / known[source]:.2f} epochs)" if source in known else ""
        parts.append(f"{source} {_number(tokens)}{epochs}")
    hint = "" if known else "; corpus_tokens='{web: 5e12, ...}' gives epochs"
    return ["", f"corpus       tokens wanted: {', '.join(parts)}{hint}"]


def _time(config: Config, made: Estimate) -> list[str]:
    hardware = config.cluster.hardware
    if hardware is None:
        return []
    kinds = kinds_of(linears_of(config))
    schedule = Schedule.of(config.train, tuple(config.data.sources))
    spent = estimate.run_seconds(config, hardware, kinds)
    total = sum(spent.values())
    least = sum(estimate.run_seconds(estimate.at_peak(config), hardware, kinds).values())
    tokens = schedule.num_steps * schedule.tokens_per_step
    shares = sorted((s / total, name) for name, s in spent.items() if s > 0.005 * total)
    useful = 3 * made.forward_flops["total"] * tokens / made.layout.gpus
    mfu = useful / total / (hardware.bf16_tflops * 1e12)
    lines = [
        "",
        f"time         {total / DAY:,.1f} days on {made.layout.gpus:,} {hardware.name}, "
        f"{total / schedule.num_steps:.2f} s a step, {tokens / total:,.0f} tokens/s; "
        f"at the datasheet's peaks no less than {least / DAY:,.1f} days",
        "bound by     " + ", ".join(f"{name} {share:.0%}" for share, name in reversed(shares)),
        f"utilization  {mfu:.0%} of the BF16 peak (model FLOPs, no recomputation)",
    ]
    if config.plan.price is not None:
        hours = made.layout.gpus * total / 3600
        lines.append(
            f"cost         {hours * config.plan.price:,.0f} {config.plan.currency}: {hours:,.0f} "
            f"GPU-hours at {config.plan.price:g}"
        )
    return lines


def _comparison(config: Config) -> list[str]:
    """Days to finish on each card in each recipe, with as many GPUs, and what bounds it."""
    days: dict[str, list[str]] = {}
    for _, recipe, spent in estimate.comparison(config):
        total = sum(spent.values())
        most = max(spent, key=lambda name: spent[name])
        days.setdefault(recipe, []).append(f"{total / DAY:,.3g} ({most} {spent[most] / total:.0%})")
    header = ["days to finish", *(estimate.card(name).name for name in estimate.CARDS)]
    rows = [[recipe, *cells] for recipe, cells in days.items()]
    gpus = max(config.cluster.workers, 1)
    return ["", *_table(header, rows), f"with {gpus:,} of each; in brackets what takes most time"]


def _assumptions(config: Config) -> list[str]:
    plan = dataclasses.asdict(config.plan)
    gemm = ", ".join(f"{name} {share:g}" for name, share in plan.pop("gemm_efficiency").items())
    others = ", ".join(
        f"{name.removesuffix('_efficiency')} {value:g}"
        for name, value in plan.items()
        if name.endswith("_efficiency") or name == "overlap"
    )
    return [
        "",
        "how sure     Memory and FLOPs are tested against real tensors and a counter; peaks and "
        "links are datasheets'.",
        f"             Efficiencies are assumptions, set with plan.*: GEMMs {gemm}; {others}.",
        "             No time here was measured. A format that a card's kernels lack is emulated "
        "in BF16.",
    ]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def _number(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.2f}{unit}".replace(".00", "")
    return f"{value:.0f}"
