"""Speed of the NVFP4 quantizers on this CPU, beside torchao's, and what a training step pays.

Method: everything runs in one process on all its threads, in rounds that alternate between the
candidates; the median round counts. A warm-up round comes first.

Packing: a 2048 x 2048 BF16 Gaussian matrix to NVFP4 (amax, block scales, packed codes). The peer is
torchao's `nvfp4_quantize` with its amax, under torch.compile; it rounds to nearest only, so our
stochastic rounding is compared with that too. Without torchao those two ratios are left out.
A ratio over 1 means that ours is faster.

Steps: forward and backward of one linear (1024 to 4096 features, 4096 tokens), and of the tiny
hybrid under the default recipe, each over the same with BF16 linears (no optimizer; the weight is
quantized anew each step, as after an update). The linear's BF16 peer is the faster of two: torch's
`F.linear` on BF16 tensors, which is slow on a CPU without BF16 instructions, and our BF16 recipe,
whose operands are BF16 values in FP32 tensors. A ratio of 1.2 means 20% more time. On a CPU the
4-bit GEMM is emulated, so these say what emulation costs, not what tensor cores gain.

Bytes: what Wgrad's operand keeps between the passes, and the cached weights over BF16 weights.

    python benchmarks/quantize_cpu.py [--json] [--rounds 15] [--size 2048]
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import show
from kernels import cpu
from model import HybridModel, ModelConfig
from quant.backend import backend
from quant.copies import quantize_rowcol
from quant.formats import MXFP8, NVFP4, NVFP4_2D
from quant.policy import Precision, apply_recipe
from quant.quantize import dequantize, quantize
from quant.recipe import named_recipe
from quant.rounding import Copy, Role, RoundingKey

KEY = RoundingKey(seed=0, step=0, microbatch=0, layer=0, role=Role.GRADIENT, copy=Copy.ROW)
OTHER_KEY = RoundingKey(seed=0, step=0, microbatch=0, layer=0, role=Role.GRADIENT, copy=Copy.COLUMN)
DEFAULT_RECIPE = "nvfp4"
STEP_SLOWER_THAN_PACKING = 5
TOKENS, IN_FEATURES, OUT_FEATURES = 4096, 1024, 4096


def measure(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each, the median of alternating rounds."""
    for run in candidates.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def torchao_pack() -> Callable[[Tensor], object] | None:
    """torchao's quantizer with its amax, compiled; None where torchao is not installed."""
    if importlib.util.find_spec("torchao") is None:
        return None
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    def pack(x: Tensor) -> object:
        return nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().amax().float()))

    return torch.compile(pack)


def packers(x: Tensor) -> dict[str, Callable[[], object]]:
    """What is timed on one matrix, by name."""
    q, q8 = quantize(x, NVFP4), quantize(x, MXFP8)

    def plain_torch() -> object:
        with backend("reference"):
            return quantize(x, NVFP4)

    candidates: dict[str, Callable[[], object]] = {
        "pack_rne": lambda: quantize(x, NVFP4),
        "pack_sr": lambda: quantize(x, NVFP4, rounding="stochastic", key=KEY),
        "pack_16x16": lambda: quantize(x, NVFP4_2D),
        "pack_mxfp8": lambda: quantize(x, MXFP8),
        "row_and_rht_column": lambda: quantize_rowcol(x, NVFP4, NVFP4, column_rht=True),
        "row_and_rht_column_sr": lambda: quantize_rowcol(
            x,
            NVFP4,
            NVFP4,
            row_rounding="stochastic",
            row_key=KEY,
            column_rounding="stochastic",
            column_key=OTHER_KEY,
            column_rht=True,
        ),
        "decode_to_fp32": lambda: dequantize(q, global_scale=False),
        "decode_to_bf16": lambda: dequantize(q, torch.bfloat16, global_scale=False),
        "decode_mxfp8_to_fp32": lambda: dequantize(q8, global_scale=False),
        "pack_rne_plain_torch": plain_torch,
    }
    theirs = torchao_pack()
    if theirs is not None:
        candidates["torchao_compiled"] = lambda: theirs(x)
    return candidates


def stepper(model: nn.Module, precision: Precision, loss: Callable[[], Tensor]) -> Callable:
    """Forward and backward of one optimizer step, with the weights quantized anew."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        model.zero_grad()
        precision.begin(step=count, microbatch=0)
        loss().backward()

    return step


class OneLinear(nn.Module):
    """A linear in a block, where recipes find it."""

    def __init__(self) -> None:
        super().__init__()
        up = nn.Linear(IN_FEATURES, OUT_FEATURES, bias=False)
        self.blocks = nn.ModuleList([nn.ModuleDict({"up": up})])

    def forward(self, x_TK: Tensor) -> Tensor:
        return self.blocks[0]["up"](x_TK)


def linear_step(recipe: str) -> Callable[[], None]:
    """The linear under a recipe, driven by a fixed output gradient."""
    model = OneLinear()
    kept = named_recipe(recipe).with_blocks(0, 0)
    precision = apply_recipe(model, kept, num_blocks=1, seed=0)
    x_TK, dy_TN = linear_data()
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        model.zero_grad()
        precision.begin(step=count, microbatch=0)
        model(x_TK).backward(dy_TN)

    return step


def plain_bf16_linear() -> Callable[[], None]:
    """`F.linear` on BF16 tensors, forward and backward."""
    weight = torch.randn(OUT_FEATURES, IN_FEATURES).bfloat16().requires_grad_()
    x_TK, dy_TN = (tensor.detach().bfloat16() for tensor in linear_data())
    x_TK.requires_grad_()

    def step() -> None:
        weight.grad = x_TK.grad = None
        torch.nn.functional.linear(x_TK, weight).backward(dy_TN)

    return step


def linear_data() -> tuple[Tensor, Tensor]:
    """x [T, K], which wants a gradient, and dy [T, N]."""
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(TOKENS, IN_FEATURES, generator=generator, requires_grad=True)
    return x_TK, torch.randn(TOKENS, OUT_FEATURES, generator=generator)


def tiny_hybrid(recipe: str) -> tuple[HybridModel, Precision]:
    """The default model under a recipe."""
    config = ModelConfig(
        pattern="M-M*-M-",
        vocab_size=2048,
        hidden_size=128,
        ffn_hidden_size=384,
        num_attention_heads=4,
        num_kv_heads=2,
        attention_head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        mamba_state_size=32,
        mamba_num_groups=2,
        mamba_chunk_size=64,
    )
    model = HybridModel(config)
    return model, apply_recipe(model, named_recipe(recipe), num_blocks=7, seed=0)


def hybrid_step(recipe: str) -> Callable[[], None]:
    """The default model on 8 sequences of 256 tokens."""
    model, precision = tiny_hybrid(recipe)
    ids = torch.randint(0, 2048, (8, 256), generator=torch.Generator().manual_seed(0))
    labels, seq_idx = ids.roll(-1, 1), torch.zeros_like(ids, dtype=torch.int32)
    return stepper(model, precision, lambda: model.loss(ids, labels, seq_idx)[0])


def weight_cache_ratio() -> float:
    """Bytes of the cached quantized weights of one linear over those of BF16 weights."""
    model = OneLinear()
    kept = named_recipe(DEFAULT_RECIPE).with_blocks(0, 0)
    precision = apply_recipe(model, kept, num_blocks=1, seed=0)
    stepper(model, precision, lambda: model(torch.randn(16, IN_FEATURES)).sum())()
    return precision.cache_nbytes / (2 * IN_FEATURES * OUT_FEATURES)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=int, default=2048)
    arguments = parser.parse_args()

    x = torch.randn(arguments.size, arguments.size, generator=torch.Generator().manual_seed(0))
    x = x.bfloat16()
    packing = measure(packers(x), arguments.rounds)
    rounds = max(3, arguments.rounds // STEP_SLOWER_THAN_PACKING)
    linears = {recipe: linear_step(recipe) for recipe in ("bf16", "nvfp4_paper")}
    linear = measure({"bf16_tensors": plain_bf16_linear(), **linears}, rounds)
    hybrid = measure({r: hybrid_step(r) for r in ("bf16", DEFAULT_RECIPE)}, rounds)

    rows = [
        {
            "name": name,
            "milliseconds": round(seconds * 1e3, 2),
            "million_elements_per_second": round(x.numel() / seconds / 1e6),
        }
        for name, seconds in packing.items()
    ]
    for name, group in (("linear", linear), ("hybrid", hybrid)):
        rows += [
            {"name": f"{name}_step_{recipe}", "milliseconds": round(seconds * 1e3, 2)}
            for recipe, seconds in group.items()
        ]
    column = quantize_rowcol(x, None, NVFP4, column_rht=True).column
    assert column is not None
    fastest_bf16 = min(linear["bf16_tensors"], linear["bf16"])
    ratios = {
        "saved_bytes_per_element": round(column.nbytes / x.numel(), 4),
        "linear_step_vs_bf16": round(linear["nvfp4_paper"] / fastest_bf16, 3),
        "default_step_vs_bf16": round(hybrid[DEFAULT_RECIPE] / hybrid["bf16"], 3),
        "weight_cache_bytes_vs_bf16": round(weight_cache_ratio(), 4),
    }
    if "torchao_compiled" in packing:
        for ours in ("pack_rne", "pack_sr"):
            ratio = packing["torchao_compiled"] / packing[ours]
            ratios[f"{ours}_vs_torchao_compiled"] = round(ratio, 2)
    kernels = "compiled kernels" if cpu.available() else f"plain torch ({cpu.reason()})"
    machine = (
        f"{platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {kernels}"
    )
    report({"machine": machine, "rows": rows, "ratios": ratios}, as_json=arguments.json)


def report(result: dict, *, as_json: bool) -> None:
    """Print one JSON object, or the method and a table."""

    def line(row: dict) -> str:
        rate = row.get("million_elements_per_second", "")
        return f"{row['name']:24}{row['milliseconds']:>10}{rate:>16}"

    missing = "pack_rne_vs_torchao_compiled" not in result["ratios"]
    why = "no pack_*_vs_torchao_compiled: torchao is not installed (pip install torchao)"
    header = f"{'':24}{'ms':>10}{'M elements/s':>16}"
    show(__doc__, result, header, line, [why] if missing else [], as_json=as_json)


if __name__ == "__main__":
    main()
