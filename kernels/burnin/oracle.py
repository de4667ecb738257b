"""One linear, and two steps of a hybrid, beside the oracle of `tests/oracle`.

Legend: T tokens, K features in, N features out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from kernels.burnin.verdicts import CheckError
from quant import apply_recipe, named_recipe
from tests.oracle import compare, paths
from tests.oracle import linear as oracle

SEED, STEP, MICROBATCH = 2**40 + 3, 7, 1


def compare_linear(device: torch.device, shape: tuple[int, int, int]) -> str:
    """y, dx and dW of a linear [T, K, N] under the paper's recipe.

    The oracle quantizes anew, with its own random bytes, so that a wrong code shows as a sum
    outside its bound.

    Raises:
        CheckError: a value outside.
    """
    t, k, n = shape
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(t, k, generator=generator)
    w_NK = torch.randn(n, k, generator=generator) * 0.05
    dy_TN = torch.randn(t, n, generator=generator)
    y, dx, dw = (
        v.float().cpu().numpy().astype(np.float64) for v in _step(x_TK, w_NK, dy_TN, device)
    )

    rules, site = oracle.Rules(), oracle.Site(SEED, STEP, MICROBATCH, 0)
    x, w, dy = (v.numpy() for v in (x_TK, w_NK, dy_TN))
    to = oracle.forward_operands("nvfp4", x, w)
    back = oracle.backward_operands("nvfp4", x, w, dy, site, rules)
    allowed = {
        "y": oracle.gemm(to["x"], to["w"], rules).allows_bf16(y),
        "dx": oracle.gemm(back["dy"], back["w_t"], rules).allows_bf16(dx),
        "dW": oracle.gemm(back["dy_t"], back["x_t"], rules).allows_sum(dw, np.zeros_like(dw)),
    }
    for name, right in allowed.items():
        if not right.all():
            raise CheckError(f"{name}: {int((~right).sum())} of {right.size} values out of bounds")
    return f"y, dx and dW of {t} x {k} x {n}: {sum(r.size for r in allowed.values()):,} values"


SLACK = {"x": 2.0**-7, "dy": 2.0**-6, "gradient": 2.0**-6}
"""Of a tensor's largest magnitude: what lies between the linears, where a card adds in another
order than a CPU and may round a convolution's operands to TF32."""


def compare_steps(device: torch.device, slack: Mapping[str, float] | None = None) -> str:
    """Two optimizer steps of a hybrid with all kinds of blocks, linear by linear.

    The oracle replays what happened: every y, dx and dW must be right for the values that its
    linear was given, and these equal to the oracle's, within `slack`. 64 tokens and features in
    multiples of 32, so that FP4 tensor cores take each quantized GEMM.

    Raises:
        CheckError: something disagrees.
    """
    path = paths.Path(recipe="nvfp4", row_length=32)
    calls = 0
    for task, witness in paths.walk(path, str(device)):
        mismatches, passes = compare.compare(task, witness, slack=slack)
        if mismatches:
            raise CheckError(
                f"{len(mismatches)} figures disagree: {compare.shown(mismatches[:3])}".replace(
                    "\n", "; "
                )
            )
        calls += len(passes.records)
    return f"two steps of {path.config.pattern}: {calls} calls of linears, gradients and updates"


def _step(x_TK: Tensor, w_NK: Tensor, dy_TN: Tensor, device: torch.device) -> list[Tensor]:
    linear = nn.Linear(w_NK.shape[1], w_NK.shape[0], bias=False)
    linear.weight = nn.Parameter(w_NK.clone())
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"up": linear})])}).to(device)
    recipe = named_recipe("nvfp4_paper").with_blocks(0, 0)
    precision = apply_recipe(model, recipe, num_blocks=1, seed=SEED)
    precision.begin(STEP, MICROBATCH)
    layer = precision.layers["blocks.0.up"]
    x = x_TK.clone().to(device).requires_grad_()
    y = layer(x)
    y.backward(dy_TN.to(device))
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad]
