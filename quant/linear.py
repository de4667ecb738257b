"""A linear whose three GEMMs run in the precision that its recipe names.

    Fprop  y_TN  = x_TK  @ W_NK.T     row copy of x,     W
    Dgrad  dx_TK = dy_TN @ W_NK       row copy of dy,    W transposed
    Wgrad  dW_NK = dy_TN.T @ x_TK     column copy of dy, column copy of x

The copies of x, and those of dy, come from one call each. The forward pass keeps only the codes and
scales of x's column copy (of a BF16 operand: x in BF16). The weight is quantized once per optimizer
step. dW leaves its GEMM in FP32 and is never rounded, for BF16 linears alike; y and dx are rounded
to BF16, as the outputs of BF16 GEMMs are.

Legend: T tokens of a micro-batch, K input features, N output features, C features of either kind.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kernels.dispatch import Problem
from quant.copies import quantize_rowcol, transposed_tokens
from quant.formats import Format
from quant.gathered import GatheredWeight
from quant.gemm import (
    Decoded,
    Factor,
    bf16_operand,
    choose_backend,
    format_name,
    gemm,
    multiplies_codes,
    transpose,
)
from quant.quantize import QuantizedTensor, nonfinite_count, quantize
from quant.recipe import BF16, ROLES, LinearRecipe, Operand
from quant.rounding import Copy, Role, RoundingKey
from quant.statistics import Statistics
from quant.weight_cache import WeightCache

MODES = ("recipe", "bf16", "bf16_forward")


def in_mode(recipe: LinearRecipe, mode: str) -> LinearRecipe:
    """What `recipe` becomes: itself, all BF16, or BF16 in Fprop only (the cheap late switch)."""
    assert mode in MODES, mode
    if mode == "bf16":
        return LinearRecipe()
    return replace(recipe, input=BF16, weight=BF16) if mode == "bf16_forward" else recipe


@dataclass(frozen=True)
class Moment:
    """What a forward pass depends on beside its tensors. Its backward pass sees the same."""

    mode: str = "recipe"
    step: int | None = None
    microbatch: int | None = None
    counts: bool = True


@dataclass
class Shared:
    """What all linears of one model share.

    backend: a name in `quant.gemm.BACKENDS`; None lets device and shape decide.
    weight_dtype: what weights are rounded to before anything else is done with them.
    nonfinite: how many NaN and infinite elements the quantizers met, on the device.
    adds_weight_gradients: whether Wgrad adds to the weight's gradient itself; see
        `Precision.adds_weight_gradients`.
    """

    seed: int
    backend: str | None = None
    weight_dtype: torch.dtype = torch.float32
    moment: Moment = Moment()
    statistics: Statistics = field(default_factory=Statistics)
    nonfinite: Tensor | None = None
    adds_weight_gradients: bool = False

    def count_nonfinite(self, count: Tensor) -> None:
        self.nonfinite = count if self.nonfinite is None else self.nonfinite + count


def _never_compiled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keep torch.compile out: the order of operations decides the bytes, and the keys change.

    As `torch.compiler.disable`, but never the first to import the compiler, which takes seconds.
    """

    @functools.wraps(forward)
    def outside(*args: Any) -> Tensor:
        if "torch._dynamo" not in sys.modules:
            return forward(*args)
        if not disabled:
            disabled.append(torch.compiler.disable(forward))
        return disabled[0](*args)

    disabled: list[Callable[..., Tensor]] = []
    return outside


class QuantLinear(nn.Linear):
    """`y = x W^T` in the precision of a `LinearRecipe`, on the weight of the linear it replaces.

    Input [..., in_features] in FP32 or BF16; output [..., out_features] in the same dtype, with
    BF16 values. The gradient of the weight is FP32.

    Attributes:
        name: the linear's name in the model.
        index: its position among all the model's linears, which names its random bits.
        recipes: its recipe in every mode.
        input_amax: FP32 scalar to quantize the inputs of Fprop with in place of each tensor's own
            amax, for inference that does not depend on what is computed together (larger elements
            saturate); None otherwise. Serves formats with a global scale alone.
    """

    def __init__(
        self, linear: nn.Linear, *, name: str, index: int, recipe: LinearRecipe, shared: Shared
    ) -> None:
        nn.Module.__init__(self)  # not Linear's: it would allocate a second weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", None)
        self.train(linear.training)
        self.name, self.index = name, index
        self.recipes = {mode: in_mode(recipe, mode) for mode in MODES}
        self.input_amax: Tensor | None = None
        self.cache = WeightCache()
        self.shared = shared
        self.num_tokens = 4096  # until the first call
        self._moment: Moment | None = None

    @property
    def recipe(self) -> LinearRecipe:
        """The recipe in the present mode."""
        return self.recipes[self.shared.moment.mode]

    @property
    def weight_dtype(self) -> torch.dtype:
        """What the weight is rounded to before it is quantized or gathered."""
        return self.shared.weight_dtype

    def backend(self, device: torch.device | None = None, num_tokens: int | None = None) -> str:
        """What runs the GEMMs, and the kernels where these are not plain torch.

        Where Fprop, Dgrad and Wgrad differ, all three are named.

        Args:
            device: where the linear will run; None for where it is.
            num_tokens: of a micro-batch; None for those of the last call.
        """
        choices = [
            choose_backend(device or self.weight.device, problem, self.shared.backend)
            for problem in self._problems(num_tokens or self.num_tokens)
        ]
        backends, kernels = (
            "/".join(dict.fromkeys(names) if len(set(names)) == 1 else names)
            for names in ([c.backend for c in choices], [c.kernel for c in choices])
        )
        return backends if kernels in ("torch", "reference") else f"{backends} ({kernels})"

    @property
    def keeps_codes(self) -> bool:
        """Whether GEMMs read codes: then scales lie as tensor cores read them, transposes too."""
        return multiplies_codes(self.weight.device, self.shared.backend)

    def _problems(self, t: int) -> list[Problem]:
        """Fprop, Dgrad and Wgrad of `t` tokens."""
        n, k = self.out_features, self.in_features
        names = [format_name(self.recipe.operand(role).spec) for role in ROLES]
        formats = zip(names[::2], names[1::2], strict=True)
        shapes = ((t, n, k), (t, k, n), (n, k, t))
        return [
            Problem(pair, rows, columns, (depth, depth))
            for pair, (rows, columns, depth) in zip(formats, shapes, strict=True)
        ]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, fprop={self.recipes['recipe'].fprop}"

    @_never_compiled
    def forward(self, x: Tensor) -> Tensor:
        """See the class. Raises ValueError where the last dimension is not in_features."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{self.name} takes {self.in_features} features, not {tuple(x.shape)}")
        training = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        moment = self._moment_of_call(training)
        call = _Call(self, moment, observed=training and moment.counts)
        if training:
            y: Tensor = _LinearFunction.apply(x, self.weight, call)
        else:
            y, _ = call.fprop(x, self.weight, keep_column=False)
        return y

    def _moment_of_call(self, training: bool) -> Moment:
        """The present moment, but in a recompute that of the forward pass it repeats.

        A forward pass inside a backward pass is the recompute of a checkpointed block. The mode may
        have changed since (an `override` that ended, an evaluation); the recompute must not.
        """
        inside_backward = torch._C._current_graph_task_id() != -1
        if not inside_backward:
            if training:
                self._moment = self.shared.moment
            return self.shared.moment
        if self._moment is None:
            raise ValueError(
                f"{self.name} is recomputed, but its forward pass ran without gradients; use "
                "torch.utils.checkpoint with use_reentrant=False"
            )
        return self._moment


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_NK: Tensor, call: _Call) -> Tensor:
        ctx.call, ctx.x_shape, ctx.x_dtype = call, x.shape, x.dtype
        y, x_KT = call.fprop(x, w_NK, keep_column=ctx.needs_input_grad[1])
        # Through save_for_backward alone, so that checkpointing can drop and recompute them.
        ctx.x_form, tensors = _take_apart(x_KT)
        ctx.save_for_backward(w_NK, *tensors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        w_NK, *tensors = ctx.saved_tensors
        call: _Call = ctx.call
        dgrad, wgrad = ctx.needs_input_grad[:2]
        dy_row, dy_NT = call.copies(
            dy.reshape(-1, dy.shape[-1]),
            Role.GRADIENT,
            "dgrad_gradient" if dgrad else None,
            "wgrad_gradient" if wgrad else None,
        )
        dx = dw_NK = None
        if dgrad:
            assert dy_row is not None
            dx_TK = call.gemm(dy_row, call.weight(w_NK, "dgrad_weight"))
            dx = _round_output(dx_TK.view(ctx.x_shape), ctx.x_dtype)
        if wgrad:
            assert dy_NT is not None
            x_KT, total = _put_together(ctx.x_form, tensors), call.gradient_so_far(w_NK)
            if total is not None:
                call.gemm(dy_NT, x_KT, total)
                return dx, None, None
            dw_NK = call.gemm(dy_NT, x_KT)
            if call.recording:
                call.statistics.weight_gradient(call.layer.name, dw_NK)
        return dx, dw_NK, None


@dataclass(frozen=True)
class _Call:
    """One forward pass of one linear with the backward pass that belongs to it.

    observed: whether it counts: non-finite values are counted and statistics taken. Not so in
        evaluation, which must not make a training step look bad.
    """

    layer: QuantLinear
    moment: Moment
    observed: bool

    @property
    def recipe(self) -> LinearRecipe:
        return self.layer.recipes[self.moment.mode]

    def gemm(self, a: Factor, b: Factor, total: Tensor | None = None) -> Tensor:
        return gemm(a, b, self.layer.shared.backend, total)

    def gradient_so_far(self, w_NK: Tensor) -> Tensor | None:
        """What Wgrad may add its product to, if adding is all that autograd would do with it."""
        if not self.layer.shared.adds_weight_gradients or self.recording or not w_NK.is_leaf:
            return None
        total = w_NK.grad
        if total is None or w_NK._backward_hooks or w_NK._post_accumulate_grad_hooks:
            return None
        written_in_tiles = total.is_contiguous() and total.data_ptr() % 16 == 0
        return total if written_in_tiles and total.dtype == torch.float32 else None

    def fprop(self, x: Tensor, w_NK: Tensor, *, keep_column: bool) -> tuple[Tensor, Factor | None]:
        """y [..., N] in x's dtype, and x's column copy [K, T] where Wgrad will need it."""
        column = "wgrad_input" if keep_column else None
        x_TK = x.reshape(-1, x.shape[-1])
        self.layer.num_tokens = x_TK.shape[0]
        x_row, x_KT = self.copies(x_TK, Role.ACTIVATION, "input", column)
        assert x_row is not None
        y_TN = self.gemm(x_row, self.weight(w_NK, "weight"))
        return _round_output(y_TN.view(*x.shape[:-1], y_TN.shape[1]), x.dtype), x_KT

    def copies(
        self, x_TC: Tensor, role: Role, row: str | None, column: str | None
    ) -> tuple[Factor | None, Factor | None]:
        """The row copy [T, C] and the column copy [C, T] of a tensor.

        row, column: which operands of the recipe they are; None where that copy is not wanted.
        """
        to_row, to_column = (self.recipe.operand(name) if name else None for name in (row, column))
        in_bf16 = bf16_operand(x_TC) if BF16 in (to_row, to_column) else None
        row_copy, column_copy = self.quantize(x_TC, role, row, column)
        return row_copy or in_bf16, column_copy or (in_bf16 and in_bf16.transpose())

    def quantize(
        self, x_TC: Tensor, role: Role, row: str | None, column: str | None
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """The quantized ones among the wanted copies, from one pass over the tensor."""
        to_row, to_column = (self.recipe.operand(name) if name else BF16 for name in (row, column))
        if not to_row.format and not to_column.format:
            return None, None
        made = quantize_rowcol(
            x_TC,
            to_row.spec,
            to_column.spec,
            row_rounding=to_row.rounding,
            column_rounding=to_column.rounding,
            row_key=self.key(to_row, role, Copy.ROW),
            column_key=self.key(to_column, role, Copy.COLUMN),
            row_guard=to_row.guard,
            row_amax=self.layer.input_amax if self._fixes_scale(row, to_row) else None,
            column_guard=to_column.guard,
            column_rht=to_column.rht,
            swizzled=self.layer.keeps_codes,
        )
        if self.observed:
            self.layer.shared.count_nonfinite(made.nonfinite)
        if row and made.row and self.recording:
            self.statistics.operand(self.layer.name, row, x_TC, made.row)
        if column and made.column and self.recording:
            source_CT = transposed_tokens(x_TC, made.column.format, to_column.rht)
            self.statistics.operand(self.layer.name, column, source_CT, made.column)
        return made.row, made.column

    def _fixes_scale(self, name: str | None, operand: Operand) -> bool:
        """Whether a row copy takes the layer's `input_amax`: the inputs of an inference pass."""
        if name != "input" or self.observed or operand.format is None:
            return False
        return operand.spec is not None and operand.spec.has_global_scale

    def weight(self, w_NK: Tensor, role: str) -> Factor:
        """The weight as the operand "weight" [N, K] or "dgrad_weight" [K, N] of the recipe."""
        transposed = role == "dgrad_weight"
        format = self.recipe.operand(role).spec
        if isinstance(w_NK, GatheredWeight):
            return self.gathered_weight(w_NK, format, transposed)
        if format is None:
            in_bf16 = bf16_operand(w_NK)
            return in_bf16.transpose() if transposed else in_bf16
        layer = self.layer
        kept = layer.keeps_codes
        along_n = transposed and (kept or not format.is_2d)
        q, made = layer.cache.get(
            w_NK,
            format,
            along_n=along_n,
            step=self.moment.step,
            swizzled=kept,
            dtype=layer.weight_dtype,
        )
        if made:
            layer.shared.count_nonfinite(nonfinite_count(w_NK))
        if self.recording:
            self.statistics.operand(layer.name, role, w_NK.t() if along_n else w_NK, q)
        if transposed and not along_n:
            return transpose(q, layer.shared.backend or "emulated")
        return q

    def gathered_weight(
        self, weight: GatheredWeight, format: Format | None, transposed: bool
    ) -> Factor:
        """As `weight`, from what this rank gathered for the present pass; nothing is kept."""
        values, kept = weight.content.values, self.layer.keeps_codes
        if format is None:
            assert values is not None
            in_bf16 = bf16_operand(values)
            return in_bf16.transpose() if transposed else in_bf16
        if values is None:
            q = weight.content.quantized()
        else:
            along_n = transposed and not format.is_2d
            q = quantize(values.t() if along_n else values, format)
            if self.observed:
                self.layer.shared.count_nonfinite(nonfinite_count(values))
        if transposed and format.is_2d and not kept:
            return transpose(q, self.layer.shared.backend or "emulated")
        q = q.transpose() if transposed and format.is_2d else q
        return q.swizzle() if kept else q

    def key(self, operand: Operand, role: Role, copy: Copy) -> RoundingKey | None:
        """The rounding key of a copy; None where it is rounded to nearest."""
        if not operand.stochastic:
            return None
        step, microbatch = self.moment.step, self.moment.microbatch
        if step is None or microbatch is None:
            raise ValueError(
                f"{self.layer.name}: stochastic rounding needs to know where in the run it is; "
                "call Precision.begin(step, microbatch) before each micro-batch"
            )
        seed = self.layer.shared.seed
        return RoundingKey(seed, step, microbatch, self.layer.index, role, copy)

    @property
    def statistics(self) -> Statistics:
        return self.layer.shared.statistics

    @property
    def recording(self) -> bool:
        return self.observed and self.statistics.active


def _round_output(y: Tensor, dtype: torch.dtype) -> Tensor:
    """An FP32 result as a BF16 GEMM would return it, in the dtype of the activations."""
    return y.to(torch.bfloat16).to(dtype)


Form = tuple[Format, torch.Size, bool]


def _take_apart(factor: Factor | None) -> tuple[Form | None, list[Any]]:
    """What to keep on the autograd context, and the tensors to save."""
    if isinstance(factor, QuantizedTensor):
        tensors = [factor.codes, factor.scales, factor.global_scale]
        return (factor.format, factor.shape, factor.swizzled), tensors
    return None, [factor.values] if factor else []


def _put_together(form: Form | None, tensors: list[Any]) -> Factor:
    """Inverse of `_take_apart`."""
    if form is None:
        return Decoded(*tensors)
    codes, scales, global_scale = tensors
    return QuantizedTensor(codes, scales, global_scale, *form)
