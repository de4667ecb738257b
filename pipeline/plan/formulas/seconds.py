"""Seconds of a step: a roofline over operations and bytes.

Legend and assumptions: `pipeline.plan.formulas`.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.config import ModelConfig
from model.loss import SLICE_ELEMENTS
from pipeline.config import HardwareConfig, PlanConfig
from pipeline.plan.formulas.held import BF16, FP32
from pipeline.plan.formulas.work import (
    elementwise_bytes,
    gemm_bytes,
    optimizer_bytes,
    passes,
    quantization_bytes,
    weight_passes_bytes,
)
from pipeline.plan.linears import Kinds, gemms, tensor_cores
from quant.linear import in_mode


@dataclass(frozen=True)
class Work:
    """What one GPU does in a step: micro-batches, each of so many tokens."""

    shape: ModelConfig
    kinds: Kinds
    tokens: int
    length: int
    micro_batches: float
    mode: str
    checkpointing: str
    parameters: float  # that this GPU updates

    @property
    def head_sliced(self) -> bool:
        return self.tokens * self.shape.vocab_size > SLICE_ELEMENTS


def gemm_seconds(work: Work, hardware: HardwareConfig, plan: PlanConfig) -> dict[str, float]:
    """A micro-batch's products by the tensor cores that run them."""
    peaks = {
        "bf16": hardware.bf16_tflops,
        "fp8": hardware.fp8_tflops,
        "fp4": hardware.fp4_tflops,
    }
    bandwidth = hardware.memory_tb_per_second * 1e12 * plan.memory_efficiency
    seconds: dict[str, float] = {}
    for linear, count in work.kinds:
        for gemm in gemms(linear, work.tokens, work.mode):
            cores = tensor_cores(gemm, (hardware.capability[0], hardware.capability[1]))
            busy = gemm.flops / (peaks[cores] * 1e12 * plan.gemm_efficiency[cores])
            times = count * passes(gemm, linear, work.checkpointing, work.head_sliced)
            spent = times * max(busy, gemm_bytes(gemm) / bandwidth)
            seconds[f"GEMMs in {cores.upper()}"] = (
                seconds.get(f"GEMMs in {cores.upper()}", 0) + spent
            )
    return seconds


def scan_seconds(work: Work, hardware: HardwareConfig, plan: PlanConfig) -> float:
    """Mamba's scan: forward, a backward of three times as much (it recomputes), and recomputes."""
    shape = work.shape
    state, chunk = shape.mamba_state_size, min(shape.mamba_chunk_size, work.length)
    inner = shape.mamba_inner_size
    flops = 2 * (chunk * (shape.mamba_num_groups * state + inner) + 2 * state * inner)
    states = 2 * FP32 * inner * state / chunk
    moved = BF16 * (2 * inner + 2 * shape.mamba_num_groups * state) + states
    forwards = 4 + (work.checkpointing != "none")
    peak = hardware.bf16_tflops * 1e12 * plan.scan_efficiency
    bandwidth = hardware.memory_tb_per_second * 1e12 * plan.memory_efficiency
    a_token = forwards * max(flops / peak, moved / bandwidth)
    return shape.pattern.count("M") * work.tokens * a_token


def attention_seconds(work: Work, hardware: HardwareConfig, plan: PlanConfig) -> float:
    """Scores and values, half of them masked; the backward pass takes 2.5 times the forward one."""
    flops = 2 * 2 * work.length * work.shape.attention_size / 2
    forwards = 3.5 + (work.checkpointing == "full")
    peak = hardware.bf16_tflops * 1e12 * plan.attention_efficiency
    return work.shape.pattern.count("*") * work.tokens * forwards * flops / peak


def step_seconds(
    work: Work, hardware: HardwareConfig, plan: PlanConfig, communicating: float
) -> dict[str, float]:
    """One step by what it is spent on; communication only as far as it does not hide."""
    bandwidth = hardware.memory_tb_per_second * 1e12
    quantizing = once_quantizing = 0.0
    other = elementwise_bytes(work.shape, work.tokens, work.checkpointing)
    for linear, count in work.kinds:
        recipe = in_mode(linear.recipe, work.mode)
        forwards = 2 if (work.checkpointing == "full" and not linear.is_head) else 1
        quantizing += count * quantization_bytes(linear, recipe, work.tokens, forwards)
        each, a_step = weight_passes_bytes(linear, recipe, forwards)
        other += count * each
        once_quantizing += count * a_step
    n = work.micro_batches
    seconds = {name: n * spent for name, spent in gemm_seconds(work, hardware, plan).items()}
    seconds["quantization"] = (n * quantizing + once_quantizing) / (
        bandwidth * plan.quantization_efficiency
    )
    seconds["scan"] = n * scan_seconds(work, hardware, plan)
    seconds["attention"] = n * attention_seconds(work, hardware, plan)
    seconds["other passes"] = (n * other + optimizer_bytes(work.parameters)) / (
        bandwidth * plan.memory_efficiency
    )
    seconds["communication"] = communicating - min(
        plan.overlap * communicating, sum(seconds.values())
    )
    return seconds
