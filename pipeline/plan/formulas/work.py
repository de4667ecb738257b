"""Operations of a GPU and bytes that it moves in its own memory.

Legend and assumptions: `pipeline.plan.formulas`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from model.config import ModelConfig
from pipeline.plan.formulas.held import BF16, FP32, cached_weight_bytes, operand_bytes
from pipeline.plan.linears import Gemm, Linear
from quant.recipe import LinearRecipe, Operand


def training_flops(forward: Mapping[str, int], checkpointing: str, head_sliced: bool) -> float:
    """Operations of a token's training step, recomputation counted: 3 forward passes' worth.

    `full` computes each block's forward pass once more, `selective` the scan's; the head's is
    repeated where the logits are cut into slices.
    """
    total = 3.0 * forward["total"]
    if checkpointing == "full":
        total += forward["total"] - forward["head_linear"]
    elif checkpointing == "selective":
        total += forward["mamba_scan"]
    return total + (forward["head_linear"] if head_sliced else 0)


def passes(gemm: Gemm, linear: Linear, checkpointing: str, head_sliced: bool) -> int:
    """How often a product runs in a micro-batch: Fprop twice where it is recomputed."""
    again = head_sliced if linear.is_head else checkpointing == "full"
    return 2 if gemm.role == "fprop" and again else 1


def gemm_bytes(gemm: Gemm) -> float:
    """Both operands read once, the result written once: FP32 of Wgrad, else BF16."""
    a, b = gemm.formats
    operands = operand_bytes(gemm.rows, gemm.depth, a) + operand_bytes(gemm.columns, gemm.depth, b)
    return operands + gemm.rows * gemm.columns * (FP32 if gemm.role == "wgrad" else BF16)


def copies_bytes(tokens: int, features: int, operands: Iterable[Operand]) -> float:
    """One pass that makes the quantized copies of a BF16 activation or gradient.

    It reads the tensor once for both, once more before where a tensor's amax is needed.
    """
    quantized = [operand.spec for operand in operands if operand.spec is not None]
    if not quantized:
        return 0.0
    reads = 2 if any(format.has_global_scale for format in quantized) else 1
    written = sum(operand_bytes(tokens, features, format) for format in quantized)
    return reads * BF16 * tokens * features + written


def quantization_bytes(linear: Linear, recipe: LinearRecipe, tokens: int, forwards: int) -> float:
    """Of a micro-batch: the copies of x in every forward pass, those of dy in the backward one."""
    x = copies_bytes(tokens, linear.in_features, (recipe.input, recipe.wgrad_input))
    dy = copies_bytes(tokens, linear.out_features, (recipe.dgrad_gradient, recipe.wgrad_gradient))
    return forwards * x + dy


def weight_passes_bytes(linear: Linear, recipe: LinearRecipe, forwards: int) -> tuple[float, float]:
    """(a micro-batch, a step): weights cast to BF16 at each use; quantized once a step.

    A gradient is added to what is there in each micro-batch: 12 bytes an element.
    """
    cast = (FP32 + BF16) * linear.elements
    uses = (forwards if recipe.weight.spec is None else 0) + (recipe.dgrad_weight.spec is None)
    quantized = {operand.spec for operand in (recipe.weight, recipe.dgrad_weight)} - {None}
    reads = sum(2 if format and format.has_global_scale else 1 for format in quantized)
    once = reads * FP32 * linear.elements + cached_weight_bytes(linear, True) if quantized else 0
    return uses * cast + 3 * FP32 * linear.elements, once


def elementwise_bytes(shape: ModelConfig, tokens: int, checkpointing: str) -> float:
    """Norms, residual adds, squared ReLU, convolution, gate, embedding and loss, in BF16.

    A pass reads its inputs and writes its outputs once. Forward and backward of a block: norm 5 D,
    residual 6 D, squared ReLU 5 F, convolution 5 C, gated norm 9 I, all times 2 bytes.
    """
    forward = backward = 0.0
    for kind in shape.pattern:
        forward += 5 * shape.hidden_size
        backward += 6 * shape.hidden_size
        if kind == "-":
            forward += 2 * shape.ffn_hidden_size
            backward += 3 * shape.ffn_hidden_size
        elif kind == "M":
            forward += 2 * shape.mamba_conv_size + 3 * shape.mamba_inner_size
            backward += 3 * shape.mamba_conv_size + 6 * shape.mamba_inner_size
    if checkpointing == "full":
        forward *= 2
    logits = 5 * FP32 * shape.vocab_size  # written, read and written by the loss, forth and back
    return tokens * (BF16 * (forward + backward) + logits + 2 * FP32 * shape.hidden_size)


def optimizer_bytes(parameters: float) -> float:
    """AdamW reads weight, gradient and two moments, and writes all but the gradient: 28 bytes."""
    return 7 * FP32 * parameters
