"""Every formula of the plan: bytes held, operations done, bytes moved, seconds. Pure arithmetic.

What is exact is tested against real tensors (memory) and a counter (operations). Times are a
roofline: each piece of work takes as long as its operations at a share of the datasheet's peak, or
its bytes at a share of the bandwidth, whichever is longer. The shares are assumptions that
`PlanConfig` holds.

Legend, in docstrings: T tokens of a micro-batch, L of a row, D hidden size, F feed-forward width,
I Mamba's inner width, C convolution channels, H Mamba's heads, N state size, Q tokens in a chunk,
A attention's width, V vocabulary, P parameters, e bytes of an activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from model.config import BLOCK_KINDS, ModelConfig
from model.loss import SLICE_ELEMENTS
from pipeline.config import HardwareConfig, PlanConfig
from pipeline.plan.linears import Gemm, Kinds, Linear, gemms, tensor_cores
from quant.formats import NVFP4_2D, Format
from quant.linear import in_mode
from quant.recipe import LinearRecipe, Operand

FP32, BF16 = 4, 2
MASTER = GRADIENT = FP32
MOMENTS = 2 * FP32  # AdamW's two


# ---- Memory -------------------------------------------------------------------------------------


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
    """

    replicas: int
    shards: int
    fp4_gather: bool = True
    scatter_each: bool = True

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
        "gradients": GRADIENT * held + whole,
        "optimizer": MOMENTS * held,
        "saved activations": saved_activations(shape, linears, batch, checkpointing)
        + attention_mask_bytes(shape, batch),
        "recomputed block": recomputed,
        "logits": logits_bytes(shape, batch),
        "weights in use": BF16 * largest + gathered,
        "flat gradients": GRADIENT * held if layout.replicas > 1 else 0,
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


# ---- Operations ---------------------------------------------------------------------------------


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


# ---- Bytes moved in a GPU -----------------------------------------------------------------------


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


# ---- Bytes between GPUs -------------------------------------------------------------------------


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
        for the forward pass and again for the backward pass of every micro-batch; FP32 gradients
        are scattered after each, or once a step, and summed over the replicas once.
    """
    s, r = layout.shards, layout.replicas
    away, between = (s - 1) / s, (r - 1) / r
    sent = {}
    if s > 1:
        sent["gather weights"] = 2 * micro_batches * away * gathered
        scatters = micro_batches if layout.scatter_each else 1
        sent["scatter gradients"] = scatters * away * GRADIENT * parameters
    if r > 1:
        sent["all-reduce gradients"] = 2 * between * GRADIENT * parameters / s
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


# ---- Time ---------------------------------------------------------------------------------------


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
