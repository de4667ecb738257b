"""Every formula of the plan: bytes held, operations done, bytes moved, seconds. Pure arithmetic.

What is exact is tested against real tensors (memory) and a counter (operations). Times are a
roofline: each piece of work takes as long as its operations at a share of the datasheet's peak, or
its bytes at a share of the bandwidth, whichever is longer. The shares are assumptions that
`PlanConfig` holds.

Legend, in docstrings: T tokens of a micro-batch, L of a row, D hidden size, F feed-forward width,
I Mamba's inner width, C convolution channels, H Mamba's heads, N state size, Q tokens in a chunk,
A attention's width, V vocabulary, P parameters, e bytes of an activation.
"""

from pipeline.plan.formulas.held import (
    Batch,
    Layout,
    attention_mask_bytes,
    checkpoint_bytes,
    linear_inputs_bytes,
    logits_bytes,
    memory,
    peak,
    saved_activations,
)
from pipeline.plan.formulas.links import communication, communication_seconds, gathered_bytes
from pipeline.plan.formulas.seconds import Work, gemm_seconds, step_seconds
from pipeline.plan.formulas.work import gemm_bytes, training_flops

__all__ = [
    "Batch",
    "Layout",
    "Work",
    "attention_mask_bytes",
    "checkpoint_bytes",
    "communication",
    "communication_seconds",
    "gathered_bytes",
    "gemm_bytes",
    "gemm_seconds",
    "linear_inputs_bytes",
    "logits_bytes",
    "memory",
    "peak",
    "saved_activations",
    "step_seconds",
    "training_flops",
]
