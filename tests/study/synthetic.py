"""A study's tables made from known gaps, so that findings can be held against the truth."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.config import ArmConfig, StudyConfig
from pipeline.curves import Curve
from pipeline.study.tables import TRAIN, VALIDATION, Row, Tables

TOKENS = 1_000_000
SIZES = {"main": (1_000_000, 1), "longer": (1_000_000, 2), "wide": (10_000_000, 1)}


def study(**changes: object) -> StudyConfig:
    arms = {
        "bf16": ArmConfig(num_seeds=3, sizes=("main", "longer", "wide")),
        "nvfp4": ArmConfig(num_seeds=3),
        "nvfp4_paper": ArmConfig(num_seeds=3, sizes=("main", "wide")),
        "mxfp4": ArmConfig(num_seeds=3, sizes=("main", "longer", "wide")),
        "no_rht": ArmConfig(),
        "late_bf16": ArmConfig(num_seeds=3, trunk="nvfp4_paper", fork_at="82%"),
    }
    settings = {"name": "known", "arms": arms, "sizes": {name: () for name in SIZES}}
    return StudyConfig(**{**settings, **changes})  # type: ignore[arg-type]


def tables(gaps: dict[str, float], noise: float = 0.0002, late: float | None = None) -> Tables:
    """Runs whose loss is the baseline's times (1 + gap + an offset of the seed's).

    late: the gap of `late_bf16` from its fork at 82% on.
    """
    rows, curves = [], {}
    for arm, config in study().arms.items():
        if arm != "bf16" and arm not in gaps and arm != "late_bf16":
            continue
        for size in config.sizes or ("main",):
            for seed in range(config.num_seeds):
                if arm == "late_bf16" and late is None:
                    continue
                row, curve = _run(arm, size, seed, gaps, noise, late)
                rows.append(row)
                curves[row.run] = {TRAIN: curve, VALIDATION: curve}
    health = [
        {
            "run": rows[-1].run, "arm": "nvfp4", "size": "main", "seed": 0, "layer": layer,
            "role": "input", "statistic": "flushed", "mean": mean, "last": mean,
        }
        for layer, mean in (("a", 0.1), ("b", 0.3), ("c", 0.2))
    ]  # fmt: skip
    return Tables(tuple(rows), curves, tuple(health), tuple(fidelity()))


def fidelity(nvfp4: float = 0.1) -> Iterator[dict[str, object]]:
    """Errors of two formats at two checkpoints; MXFP4's are 0.2."""
    for tokens in (TOKENS // 2, TOKENS):
        for recipe, error in (("nvfp4", nvfp4), ("mxfp4", 0.2)):
            for kind, gemm in (("ffn.up", "wgrad"), ("ffn.down", "wgrad"), ("all", "gradient")):
                yield {
                    "tokens": tokens, "recipe": recipe, "kind": kind, "gemm": gemm,
                    "relative_error": error,
                }  # fmt: skip


def _run(
    arm: str, size: str, seed: int, gaps: dict[str, float], noise: float, late: float | None
) -> tuple[Row, Curve]:
    parameters, longer = SIZES[size]
    end = TOKENS * longer
    tokens = np.linspace(end / 100, end, 100)
    batches = np.random.default_rng([seed, longer]).normal(0, 0.02, 100)  # shared by all arms
    loss = (2.0 - 0.1 * np.log2(longer) + np.exp(-3 * tokens / end)) * (1 + batches)
    own = np.random.default_rng([seed, sum(map(ord, arm + size))]).normal(0, noise)
    fork = 0.82 * end
    if arm == "late_bf16":
        kept = tokens > fork
        tokens, loss = tokens[kept], loss[kept] * (1 + (late or 0.0) + own)
    elif arm != "bf16":
        loss = loss * (1 + gaps[arm] + own)
    figures = {"bits_per_byte/code": 1.5, "accuracy/continuation": 0.4, "checkpoint_bytes": 2e6}
    forked = int(fork) if arm == "late_bf16" else None
    name = f"known-{size}-{arm}-s{seed}"
    row = Row(name, arm, size, seed, "configured", "data", parameters, end, forked, figures)
    return row, Curve(tokens, loss)
