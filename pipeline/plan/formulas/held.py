"""Bytes that a GPU holds, by category; tested against the tensors of real runs.

Legend and assumptions: `pipeline.plan.formulas`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from model.config import BLOCK_KINDS, ModelConfig
from model.loss import SLICE_ELEMENTS
from pipeline.plan.linears import Linear
from quant.formats import Format
from quant.recipe import Operand

FP32, BF16 = 4, 2
MASTER = GRADIENT = FP32
INTEGER_SUM = 8  # of an element of a gradient that is summed reproducibly
MOMENTS = 2 * FP32  # AdamW's two


@dataclass(frozen=True)
class Batch:
    """A micro-batch in one GPU's memory.

    element: bytes of an activation: 2 on GPUs, 4 on a CPU.
    fused: whether mamba-ssm's and causal-conv1d's kernels run, as on GPUs.
    chunk: tokens in a chunk of the scan in plain torch.
    """

    rows: int
    length: int
    element: int = BF16
    fused: bool = True
    chunk: int = 128

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def operand_bytes(rows: int, columns: int, format: Format | None) -> int:
    """A matrix in a format whose blocks lie along its columns; square blocks repeat scales by row.

    The last block of a row may be cut short.
    """
    if format is None:
        return BF16 * rows * columns
    codes = rows * columns * format.element_bits // 8
    scales = rows * -(-columns // format.block[1]) * format.scale_dtype.itemsize
    return codes + scales + (FP32 if format.has_global_scale else 0)


def cached_weight_bytes(linear: Linear, both_orders: bool) -> int:
    """The quantized copies of a weight that a step keeps: one, or two where Dgrad needs its own.

    both_orders: whether square blocks too are kept transposed, as GPUs read them.
    """
    n, k = linear.out_features, linear.in_features
    forward, backward = linear.recipe.weight.spec, linear.recipe.dgrad_weight.spec
    total = operand_bytes(n, k, forward) if forward else 0
    if backward and (both_orders or not backward.is_2d):
        total += operand_bytes(k, n, backward)
    elif backward and not forward:
        total += operand_bytes(n, k, backward)
    return total


def saved_input_bytes(tokens: int, features: int, operand: Operand) -> int:
    """What a linear keeps of its input for Wgrad: [features, T], blocks along tokens."""
    return operand_bytes(features, tokens, operand.spec)


def linear_inputs_bytes(linears: Iterable[Linear], batch: Batch) -> int:
    """What linears that read the same tensor keep of it.

    In BF16 all of them keep the tensor itself; where activations are FP32 each keeps a copy.
    """
    total, itself = 0, False
    for linear in linears:
        shared = linear.recipe.wgrad_input.spec is None and batch.element == BF16
        if not (shared and itself):
            total += saved_input_bytes(batch.tokens, linear.in_features, linear.recipe.wgrad_input)
        itself = itself or shared
    return total


def saved_activations(
    shape: ModelConfig, linears: Mapping[str, Linear], batch: Batch, checkpointing: str
) -> int:
    """Bytes that autograd holds when the forward pass ends, logits and weights left out.

    checkpointing: `none`, `selective` (what lies between the linears is recomputed), or `full`
        (only each block's input is kept).
    """
    total = 0
    for index, kind in enumerate(shape.pattern):
        if checkpointing == "full":
            total += batch.element * batch.tokens * shape.hidden_size
        else:
            total += block_activations(shape, index, kind, linears, batch, checkpointing)
    head = linear_inputs_bytes([linears["head"]], batch)
    sliced = batch.tokens * shape.vocab_size > SLICE_ELEMENTS
    final_norm = batch.tokens * (batch.element * shape.hidden_size + FP32)
    normed = batch.element * batch.tokens * shape.hidden_size
    return total + final_norm + (normed if sliced else head)


def block_activations(
    shape: ModelConfig,
    index: int,
    kind: str,
    linears: Mapping[str, Linear],
    batch: Batch,
    checkpointing: str = "none",
) -> int:
    """What one block keeps: its norm's input (e D and 4 a token), its linears' inputs, its core."""
    mixer = BLOCK_KINDS[kind]
    part = f"blocks.{index}.{mixer}."
    first, last = {
        "mamba": (("in_zxbc", "in_dt"), "out"),
        "ffn": (("up",), "down"),
        "attention": (("qkv",), "o"),
    }[mixer]
    inputs = linear_inputs_bytes([linears[part + name] for name in first], batch)
    inputs += linear_inputs_bytes([linears[part + last]], batch)
    norm = batch.tokens * (batch.element * shape.hidden_size + FP32)
    core = {"mamba": mamba_core, "ffn": ffn_core, "attention": attention_core}[mixer]
    return norm + inputs + core(shape, batch, checkpointing == "selective")


def mamba_core(shape: ModelConfig, batch: Batch, recomputed: bool) -> int:
    """Between Mamba's linears. All of it: z, x, B, C and dt as they come (e (I + C) + e H), then

    fused: the convolution's output e C, the scan's e I, dt and its running sums 8 H, y in FP32 4 I;
    in torch, all FP32: the convolution's sums and output 8 C, dt and its softplus 8 H, y 4 I, the
    states 4 I N (L / Q + 1) a row, the decays 4 H Q; and the gated norm's 4 bytes a group.
    """
    inner, channels, heads = shape.mamba_inner_size, shape.mamba_conv_size, shape.mamba_num_heads
    e, t = batch.element, batch.tokens
    incoming = t * e * (inner + channels)
    if recomputed:
        return incoming + t * e * heads
    norm = t * FP32 * shape.mamba_num_groups
    if batch.fused:
        return incoming + norm + t * (e * channels + e * inner + 8 * heads + FP32 * inner)
    chunks = -(-batch.length // batch.chunk)
    states = FP32 * batch.rows * inner * shape.mamba_state_size * (chunks + 1)
    torch = t * (8 * channels + 8 * heads + FP32 * inner + FP32 * heads * batch.chunk)
    taps = FP32 * channels * shape.mamba_conv_kernel
    return incoming + norm + torch + states + taps


def ffn_core(shape: ModelConfig, batch: Batch, recomputed: bool) -> int:
    """The squared ReLU's input, e F; recomputing it saves nothing but its output."""
    return batch.element * batch.tokens * shape.ffn_hidden_size


def attention_core(shape: ModelConfig, batch: Batch, recomputed: bool) -> int:
    """Queries, keys, values and the output, each in e bytes, and 4 bytes a head and token.

    Rotary positions make other queries and keys beside them.
    """
    width = 2 * shape.attention_size + 2 * shape.attention_kv_size
    if shape.rope_theta is not None:
        width += shape.attention_size + shape.attention_kv_size
    heads = FP32 * shape.num_attention_heads
    return batch.tokens * (batch.element * width + heads)


def attention_mask_bytes(shape: ModelConfig, batch: Batch) -> int:
    """One mask for all attention blocks where rows hold several documents: e L^2 a row."""
    if "*" not in shape.pattern:
        return 0
    return batch.element * batch.rows * batch.length**2


def logits_bytes(shape: ModelConfig, batch: Batch) -> int:
    """A slice of the logits in FP32, and as the head gave them where that is narrower."""
    tokens = min(batch.tokens, max(1, SLICE_ELEMENTS // shape.vocab_size))
    return tokens * shape.vocab_size * (FP32 + (batch.element if batch.element < FP32 else 0))


@dataclass(frozen=True)
class Layout:
    """How parameters lie on GPUs: `replicas` groups of `shards` GPUs, each group with all.

    fp4_gather, scatter_each: `cluster.fp4_gather` and `cluster.scatter_each_micro_batch`.
    reproducible: `train.reproducible`, whose sums of gradients are 64-bit integers.
    """

    replicas: int
    shards: int
    fp4_gather: bool = True
    scatter_each: bool = True
    reproducible: bool = False

    @property
    def summed_bytes(self) -> int:
        """Of an element of a gradient as it is summed over GPUs."""
        return INTEGER_SUM if self.reproducible else GRADIENT

    @property
    def gpus(self) -> int:
        return self.replicas * self.shards


def memory(
    shape: ModelConfig,
    linears: Mapping[str, Linear],
    parameters: int,
    batch: Batch,
    checkpointing: str,
    layout: Layout,
) -> dict[str, float]:
    """Bytes a GPU by category; not all of them at once, see `peak`."""
    held = parameters / layout.shards
    blocks = [
        block_activations(shape, index, kind, linears, batch)
        for index, kind in enumerate(shape.pattern)
    ]
    recomputed = max(blocks) if checkpointing == "full" else 0
    if checkpointing == "selective":
        recomputed = max(
            whole - block_activations(shape, index, kind, linears, batch, "selective")
            for index, (kind, whole) in enumerate(zip(shape.pattern, blocks, strict=True))
        )
    largest = max(linear.elements for linear in linears.values())
    caches: float = sum(cached_weight_bytes(linear, batch.fused) for linear in linears.values())
    gathered, whole = 0.0, 0.0
    if layout.shards > 1:  # two blocks' weights are gathered at a time, and one's gradients whole
        caches = caches / layout.shards
        gathered = (2 * BF16 + FP32) * max(block_parameters(linears).values())
        whole = 0.0 if layout.scatter_each else GRADIENT * parameters
    return {
        "weights": MASTER * held,
        "quantized weights": caches,
        "gradients": GRADIENT * held + whole + (INTEGER_SUM * held if layout.reproducible else 0),
        "optimizer": MOMENTS * held,
        "saved activations": saved_activations(shape, linears, batch, checkpointing)
        + attention_mask_bytes(shape, batch),
        "recomputed block": recomputed,
        "logits": logits_bytes(shape, batch),
        "weights in use": BF16 * largest + gathered,
        "flat gradients": layout.summed_bytes * held if layout.replicas > 1 else 0,
    }


STATE = ("weights", "quantized weights", "gradients", "optimizer")


def peak(held: Mapping[str, float]) -> float:
    """What is there always, and the larger of the backward pass and the sum of gradients."""
    always = sum(held[name] for name in STATE)
    flat = held["flat gradients"]
    return always + max(flat, sum(held.values()) - always - flat)


def block_parameters(linears: Mapping[str, Linear]) -> dict[str, int]:
    """Elements of the linears of each block, and of the head."""
    sizes: dict[str, int] = {}
    for name, linear in linears.items():
        block = ".".join(name.split(".")[:2])
        sizes[block] = sizes.get(block, 0) + linear.elements
    return sizes


def checkpoint_bytes(parameters: int) -> int:
    """Weights and both moments in FP32; the rest is small."""
    return (MASTER + MOMENTS) * parameters
