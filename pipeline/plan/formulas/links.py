"""Bytes between GPUs, by collective, and the seconds that they take.

Legend and assumptions: `pipeline.plan.formulas`.
"""

from __future__ import annotations

from collections.abc import Mapping

from model.config import ModelConfig
from pipeline.config import HardwareConfig
from pipeline.plan.formulas.held import BF16, FP32, Layout
from pipeline.plan.linears import Kinds
from quant.formats import NVFP4_2D
from quant.linear import in_mode


def gathered_bytes(
    shape: ModelConfig, kinds: Kinds, parameters: int, layout: Layout, mode: str
) -> float:
    """Bytes of all weights as a gather moves them in a mode of the recipe: a linear's as 4-bit
    codes with their 16x16 block scales where both passes read those and no block is cut, else in
    BF16; the rest in FP32, a tied head too."""
    linears = [(linear, n) for linear, n in kinds if not (linear.is_head and shape.tie_embeddings)]
    total = float(FP32 * (parameters - sum(n * linear.elements for linear, n in linears)))
    for linear, count in linears:
        recipe = in_mode(linear.recipe, mode)
        as_codes = (
            layout.fp4_gather
            and recipe.weight.spec == recipe.dgrad_weight.spec == NVFP4_2D
            and linear.out_features % (NVFP4_2D.block[0] * layout.shards) == 0
        )
        total += count * linear.elements * (1 / 2 + 1 / 16**2 if as_codes else BF16)
    return total


def communication(
    parameters: int,
    gathered: float,
    layout: Layout,
    micro_batches: float,
) -> dict[str, float]:
    """Bytes that a GPU sends in a step, by collective; rings.

    gathered: bytes of all weights as a gather moves them (`gathered_bytes`). Shards are gathered
        for the forward pass and again for the backward pass of every micro-batch; gradients
        are scattered after each, or once a step, and summed over the replicas once.
    """
    s, r = layout.shards, layout.replicas
    away, between = (s - 1) / s, (r - 1) / r
    sent = {}
    if s > 1:
        sent["gather weights"] = 2 * micro_batches * away * gathered
        scatters = micro_batches if layout.scatter_each else 1
        sent["scatter gradients"] = scatters * away * layout.summed_bytes * parameters
    if r > 1:
        sent["all-reduce gradients"] = 2 * between * layout.summed_bytes * parameters / s
    return sent


def communication_seconds(
    sent: Mapping[str, float], layout: Layout, hardware: HardwareConfig, efficiency: float
) -> float:
    """At the bandwidth of the links that a collective crosses.

    Shards lie in one NVLink domain where they fit. An all-reduce over several domains reduces
    within each first: between domains each GPU then moves its part alone.
    """
    nvlink = hardware.nvlink_gb_per_second * 1e9 * efficiency
    network = hardware.network_gb_per_second * 1e9 * efficiency
    domain = hardware.nvlink_gpus
    seconds = 0.0
    for name, bytes_ in sent.items():
        if name != "all-reduce gradients":
            seconds += bytes_ / (nvlink if layout.shards <= domain else network)
        elif layout.gpus <= domain:
            seconds += bytes_ / nvlink
        else:
            inside = max(domain // layout.shards, 1)  # replicas that share a domain
            seconds += bytes_ / nvlink * (inside > 1) + bytes_ / inside / network
    return seconds
