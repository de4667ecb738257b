"""How far a recipe is from BF16: its three GEMMs on given tensors, its gradient, its rounding.

Local fidelity takes each linear alone. One BF16 pass over a batch gives the linear's true input x
and output gradient dy; every recipe then runs its three GEMMs on these same tensors, through the
linear that training uses. So errors are comparable between recipes and do not pile up. What they
are measured against is the product of the BF16 operands in FP32, not rounded after.

End to end, a whole backward pass under a recipe is compared with that in BF16.

Legend: T tokens of a micro-batch, K input features, N output features, C features of either kind.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quant.copies import quantize_weight
from quant.formats import NVFP4
from quant.gemm import bf16_operand, gemm
from quant.linear import QuantLinear
from quant.policy import Precision, apply_recipe
from quant.quantize import QuantizedTensor, dequantize, quantize
from quant.recipe import LinearRecipe, Recipe
from quant.rounding import RoundingKey

GEMM_NAMES = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Distance:
    """Between measured and true values, as sums over elements; distances of parts add up."""

    error: float  # sum of (measured - true)^2
    true: float  # sum of true^2
    measured: float  # sum of measured^2
    product: float  # sum of measured * true

    @staticmethod
    def between(measured: Tensor, true: Tensor) -> Distance:
        """Sums of two tensors of one shape, in FP64."""
        a, b = measured.double().flatten(), true.double().flatten()
        sums = [(a - b).square().sum(), b.dot(b), a.dot(a), a.dot(b)]
        return Distance(*torch.stack(sums).tolist())

    def __add__(self, other: Distance) -> Distance:
        return Distance(
            self.error + other.error,
            self.true + other.true,
            self.measured + other.measured,
            self.product + other.product,
        )

    @property
    def relative_error(self) -> float:
        """Norm of the error over the norm of the true values; 0 between zeros."""
        if self.error == 0:
            return 0.0
        return math.sqrt(self.error / self.true) if self.true else math.inf

    @property
    def cosine(self) -> float:
        """1 for the same direction, and between zeros; 0 where only one of them is zero."""
        if self.error == 0:
            return 1.0
        norms = math.sqrt(self.true * self.measured)
        return self.product / norms if norms else 0.0


@dataclass(frozen=True)
class Captured:
    """What one linear met in one pass, rounded to BF16: input [T, K], output's gradient [T, N]."""

    x_TK: Tensor
    dy_TN: Tensor


Products = dict[str, Tensor]
"""A linear's y [T, N], dx [T, K] and dW [N, K], under the names of their GEMMs."""


def under_recipe(
    model: nn.Module, recipe: Recipe, *, num_blocks: int, seed: int
) -> tuple[nn.Module, Precision]:
    """A copy of a model of plain linears, with a recipe applied to it. Raises as `apply_recipe`."""
    copied = copy.deepcopy(model)
    return copied, apply_recipe(copied, recipe, num_blocks=num_blocks, seed=seed)


@contextmanager
def capturing(precision: Precision, names: Collection[str]) -> Iterator[dict[str, Captured]]:
    """Within it, a forward and backward pass fills the mapping with what each linear met.

    Each of the linears must be called once in the pass.
    """
    seen: dict[str, Captured] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
        def on_forward(module: nn.Module, inputs: tuple[Tensor], y: Tensor) -> None:
            x_TK = _as_matrix(inputs[0])

            def on_backward(dy: Tensor) -> None:
                assert name not in seen, f"{name} was called twice"
                seen[name] = Captured(x_TK, _as_matrix(dy))

            if y.requires_grad:
                y.register_hook(on_backward)

        return on_forward

    handles = [precision.layers[name].register_forward_hook(watch(name)) for name in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _as_matrix(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).to(torch.bfloat16)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient by name; zeros where no backward pass reached it."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }


def gemms(layer: QuantLinear, captured: Captured) -> Products:
    """What the layer makes of the captured tensors in its present precision."""
    x_TK = captured.x_TK.clone().requires_grad_()
    y_TN = layer(x_TK)
    dx_TK, dw_NK = torch.autograd.grad(y_TN, (x_TK, layer.weight), captured.dy_TN)
    return {"fprop": y_TN.detach(), "dgrad": dx_TK, "wgrad": dw_NK}


def true_gemms(layer: QuantLinear, captured: Captured) -> Products:
    """What `gemms` is measured against: products of the BF16 operands, in FP32 throughout."""
    x_TK, dy_TN = bf16_operand(captured.x_TK), bf16_operand(captured.dy_TN)
    w_NK = bf16_operand(layer.weight.detach())
    return {
        "fprop": gemm(x_TK, w_NK, layer.shared.backend),
        "dgrad": gemm(dy_TN, w_NK.transpose(), layer.shared.backend),
        "wgrad": gemm(dy_TN.transpose(), x_TK.transpose(), layer.shared.backend),
    }


def gemm_distances(measured: Products, true: Products) -> dict[str, Distance]:
    """Distance of each GEMM's result."""
    return {name: Distance.between(measured[name], true[name]) for name in GEMM_NAMES}


def weight_mismatch(w_NK: Tensor, recipe: LinearRecipe) -> float:
    """How far the weight that Dgrad multiplies is from the one that Fprop does.

    Returns:
        Norm of the difference over the norm of the weight; 0.0 where they are equal bit for bit.
    """
    fprop, dgrad = recipe.weight.spec, recipe.dgrad_weight.spec
    assert fprop is not None, "only a quantized weight has two copies"
    assert dgrad is not None, "only a quantized weight has two copies"
    w_fprop_NK = dequantize(quantize_weight(w_NK, fprop)[0])
    w_dgrad_NK = dequantize(quantize_weight(w_NK, dgrad)[1]).t()
    difference = (w_fprop_NK - w_dgrad_NK).norm() / w_NK.detach().norm()
    return float(difference)


def kurtosis(x_TC: Tensor) -> float:
    """Fourth moment over the squared second along the tokens, mean over channels.

    3 for a Gaussian, T for a single outlier among zeros. Channels of zeros do not count.
    """
    square_TC = x_TC.double().square()
    second_C, fourth_C = square_TC.mean(0), square_TC.square().mean(0)
    used_C = second_C > 0
    return float((fourth_C[used_C] / second_C[used_C].square()).mean()) if used_C.any() else 0.0


@dataclass(frozen=True)
class RoundingBias:
    """What a rounding does to one tensor, once and on average. Norms over the tensor's norm.

    Attributes:
        error: of one draw, root mean square over the draws.
        bias: error of the mean of N draws, by N.
        floor: the bias of infinitely many draws, computed from the rule of rounding:
            probabilities are multiples of 1/256, and what lies above 6 is cut.
        spread: standard deviation of a draw, computed likewise; 0 for rounding to nearest.
        slope: projection of the mean of all draws on the tensor, minus 1.
    """

    error: float
    bias: dict[int, float]
    floor: float
    spread: float
    slope: float

    def predicted(self, num_draws: int) -> float:
        """What `bias` should be, from the rule of rounding alone."""
        return math.sqrt(self.floor**2 + self.spread**2 / num_draws)


def rounding_bias(
    x_RC: Tensor, counts: Sequence[int], key: RoundingKey | None, *, guard: bool = False
) -> RoundingBias:
    """Quantize a matrix to NVFP4 again and again, and see what the mean keeps of the error.

    Args:
        x_RC: a gradient, not all zeros.
        counts: numbers of draws to take the mean of, ascending.
        key: names the tensor; the draws take its micro-batch and the ones after. None rounds to
            nearest, where one draw is as good as many.
        guard: as in `quantize`.
    """
    x = x_RC.detach().float()
    norm = float(x.norm())
    total, squares, bias = torch.zeros_like(x), 0.0, {}
    for number in range(1, counts[-1] + 1):
        q = _draw(x_RC, key, number - 1, guard)
        rounded = dequantize(q)
        total += rounded
        squares += float((rounded - x).norm()) ** 2
        if number in counts:
            bias[number] = float((total / number - x).norm()) / norm
    mean, variance = (rounded, 0.0) if key is None else _stochastic_moments(x_RC, q)
    return RoundingBias(
        error=math.sqrt(squares / counts[-1]) / norm,
        bias=bias,
        floor=float((mean - x).norm()) / norm,
        spread=math.sqrt(variance) / norm,
        slope=float((total / counts[-1] * x).sum()) / norm**2 - 1,
    )


def _draw(x_RC: Tensor, key: RoundingKey | None, number: int, guard: bool) -> QuantizedTensor:
    if key is None:
        return quantize(x_RC, NVFP4)
    draw = replace(key, microbatch=key.microbatch + number)
    return quantize(x_RC, NVFP4, rounding="stochastic", key=draw, guard=guard)


def _stochastic_moments(x_RC: Tensor, q: QuantizedTensor) -> tuple[Tensor, float]:
    """Mean of stochastic rounding under the scales of `q`, and the variance of the whole tensor.

    The rule: with f the position between two neighbouring codes, up with probability
    floor(256 f) / 256.
    """
    assert q.global_scale is not None
    scale = (q.scales.float() * q.global_scale).repeat_interleave(q.format.block[1], dim=1)
    scale = scale[:, : x_RC.shape[1]]
    # In FP32 and in the quantizer's order: a value just under a step would else be one below it.
    encode = (1 / scale).clamp(max=torch.finfo(torch.float32).max)
    magnitude = (x_RC.detach().float().abs() * encode).clamp(max=6)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    # Steps begin at multiples of themselves, so one floor serves the code and the probability.
    mean = (magnitude / step * 256).floor() / 256 * step
    up = mean / step % 1
    variance = (up * (1 - up) * (step * scale).square()).sum()
    return mean * scale * x_RC.sign(), float(variance)
