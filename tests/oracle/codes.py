"""The bytes that the `quant` library gives for the operands of a witnessed step.

Legend: T tokens of a micro-batch, K input features, N output features.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quant import (
    MXFP8,
    NVFP4,
    NVFP4_2D,
    Copy,
    QuantizedTensor,
    Role,
    RoundingKey,
    quantize,
    rht_transpose,
)
from tests.oracle.compare import Mismatch
from tests.oracle.linear import Formats
from tests.oracle.quantizers import Operand, padded_transpose
from tests.oracle.step import Arrays, Passes, Step
from tests.oracle.witness import Witness


def compare_codes(step: Step, witness: Witness, passes: Passes) -> list[Mismatch]:
    """Codes, block scales and tensor scale of every operand, byte by byte, given equal inputs."""
    mismatches = []
    layers = list(step.formats)
    for (name, microbatch), record in passes.records.items():
        site = (step.seed, step.step, microbatch, layers.index(name))
        weight_NK = torch.from_numpy(step.weights[f"{name}.weight"])
        call = witness.calls[name, microbatch]
        for operand, made in library_operands(call, weight_NK, step.formats[name], site).items():
            wrong = differing_bytes(record.operands[operand], made)
            if wrong:
                where, size = f"{name, microbatch}", made.codes.numel()
                mismatches.append(Mismatch(f"codes of {operand}", where, wrong, size))
    return mismatches


def library_operands(
    call: Arrays, weight_NK: Tensor, formats: Formats, site: tuple[int, int, int, int]
) -> dict[str, QuantizedTensor]:
    """What ``quantize`` makes of one linear's quantized operands; BF16 ones have no bytes."""
    x_TK, dy_TN = torch.from_numpy(call["x"]), torch.from_numpy(call["dy"])
    made: dict[str, QuantizedTensor] = {}
    if formats.forward == "nvfp4":
        made |= {"x": quantize(x_TK, NVFP4), "w": quantize(weight_NK, NVFP4_2D)}
    elif formats.forward == "mxfp8":
        made |= {"x": quantize(x_TK, MXFP8), "w": quantize(weight_NK, MXFP8)}
    if formats.backward == "nvfp4":
        row, column = (RoundingKey(*site, Role.GRADIENT, copy) for copy in (Copy.ROW, Copy.COLUMN))
        dy_NT = rht_transpose(dy_TN)
        made |= {
            "dy": quantize(dy_TN, NVFP4, rounding="stochastic", key=row),
            "w_t": quantize(weight_NK, NVFP4_2D).transpose(),
            "dy_t": quantize(dy_NT, NVFP4, rounding="stochastic", key=column),
            "x_t": quantize(rht_transpose(x_TK), NVFP4),
        }
    elif formats.backward == "mxfp8":
        dy_NT, x_KT = (
            torch.from_numpy(padded_transpose(call[what], 32).copy()) for what in ("dy", "x")
        )
        made |= {
            "dy": quantize(dy_TN, MXFP8),
            "w_t": quantize(weight_NK.t(), MXFP8),
            "dy_t": quantize(dy_NT, MXFP8),
            "x_t": quantize(x_KT, MXFP8),
        }
    return made


def as_bytes(q: QuantizedTensor) -> tuple[bytes, bytes, float | None]:
    """Codes, block scales, tensor scale."""
    scale = None if q.global_scale is None else float(q.global_scale)
    scales = q.scales.contiguous().view(torch.uint8).numpy()
    return q.codes.contiguous().numpy().tobytes(), scales.tobytes(), scale


def operand_bytes(operand: Operand) -> tuple[bytes, bytes, float | None]:
    assert operand.codes is not None
    assert operand.scales is not None
    scale = None if operand.global_scale is None else float(operand.global_scale)
    return operand.codes.tobytes(), operand.scales.tobytes(), scale


def differing_bytes(operand: Operand, q: QuantizedTensor) -> int:
    """How many bytes of codes and scales differ, the tensor scale counting as one."""
    wrong = 0
    for mine, other in zip(operand_bytes(operand), as_bytes(q), strict=True):
        if isinstance(mine, bytes):
            assert isinstance(other, bytes)
            assert len(mine) == len(other)
            wrong += int((np.frombuffer(mine, np.uint8) != np.frombuffer(other, np.uint8)).sum())
        else:
            wrong += mine != other
    return wrong
