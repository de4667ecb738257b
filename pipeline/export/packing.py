"""A model's linears in NVFP4, with the codes that its training multiplied, in public layouts.

What trained in NVFP4 is stored as it trained: the codes and scales of Fprop's weight. A 16x16 block
scale becomes 16 equal rows; a linear that the public layout cuts in several (q, k and v) gives each
its rows, and the one global scale. Two things have no place there:

- `in_proj` joins the dt projection, which trained in BF16, to `in_zxbc`, and has one format. Where
  `in_zxbc` trained in NVFP4 the dt rows are quantized too, in 1x16 blocks under the global scale
  of `in_zxbc`, whose codes so stay what they were; the error is reported.
- MXFP8 (Mamba's out_proj in the recipe `nvfp4`): such linears stay in BF16.

Legend: K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model import ModelConfig
from model.hf import Rows, linear_rows
from pipeline.config import ConfigError
from quant import NVFP4, NVFP4_2D, Precision, QuantizedTensor, QuantLinear, quantize
from quant.quantize import amax_of
from quant.reference import nvfp4_global_scales

COMPRESSED_TENSORS, MODELOPT = "nvfp4-compressed-tensors", "nvfp4-modelopt"


@dataclass(frozen=True)
class PackedLinear:
    """One linear of the public layout, codes [N, K/2] and scales [N, K/16] in `weight`.

    amax: FP32 scalar, of the weight that was quantized, as training saw it.
    input_amax: FP32 scalar, the largest input that calibration met.
    """

    weight: QuantizedTensor
    amax: Tensor
    input_amax: Tensor

    @property
    def encode(self) -> Tensor:
        """FP32 scalar, what the weight was multiplied by (2688 / amax)."""
        return nvfp4_global_scales(self.amax).encode


@dataclass(frozen=True)
class DtRows:
    """What packing did to the dt rows of one in_proj, which trained in BF16."""

    linear: str
    rows: tuple[int, int]
    relative_error: float  # Frobenius norm of the change over that of the rows
    clipped: int  # elements beyond what the shared global scale can hold


@dataclass(frozen=True)
class Packing:
    """packed: by public name. ignored: all other linears, each with why. dt_rows: see there."""

    packed: Mapping[str, PackedLinear]
    ignored: Mapping[str, str]
    dt_rows: tuple[DtRows, ...]


def pack_linears(
    config: ModelConfig, precision: Precision, input_amax: Mapping[str, Tensor]
) -> Packing:
    """Pack what the recipe trained in NVFP4.

    Raises `ConfigError` where that is nothing.
    """
    packed, ignored, dt_rows = {}, {}, []
    weights: dict[str, PackedLinear] = {}
    for theirs, parts in linear_rows(config).items():
        first = precision.layers[parts[0].linear]
        reason = _why_not(first)
        if reason:
            ignored[theirs] = reason
            continue
        if first.name not in weights:
            weights[first.name] = _pack(first, input_amax[first.name])
        whole = weights[first.name]
        rows = _cut(whole, parts[0])
        if len(parts) > 1:
            dt = precision.layers[parts[1].linear].weight.detach()
            rows, report = _with_dt_rows(theirs, rows, dt)
            dt_rows.append(report)
        packed[theirs] = rows
    if not packed:
        raise ConfigError(
            f"export: the recipe {precision.recipe.name} trained no linear in NVFP4, so there is "
            "nothing to pack; export with format=hf"
        )
    return Packing(packed, ignored, tuple(dt_rows))


def _why_not(layer: QuantLinear) -> str | None:
    """Why a linear cannot be packed; None where it can."""
    format = layer.recipes["recipe"].weight.spec
    if format in (NVFP4, NVFP4_2D):
        return None
    return f"trained in {format.name}, which is not stored here" if format else "trained in bf16"


def _pack(layer: QuantLinear, input_amax: Tensor) -> PackedLinear:
    """The weight as training's Fprop quantizes it."""
    weight = layer.weight.detach().to(layer.weight_dtype)
    format = layer.recipes["recipe"].weight.spec
    assert format is not None
    amax = amax_of(weight)
    q = quantize(weight, format, amax=amax)
    return PackedLinear(q, amax, input_amax)


def _cut(whole: PackedLinear, rows: Rows) -> PackedLinear:
    q, part = whole.weight, slice(rows.start, rows.end)
    return PackedLinear(
        _one_row_blocks(q, q.codes[part], q.scales[part]), whole.amax, whole.input_amax
    )


def _one_row_blocks(q: QuantizedTensor, codes: Tensor, scales: Tensor) -> QuantizedTensor:
    """Rows with a scale each: what any NVFP4 tensor is once its block scales stand row by row."""
    shape = torch.Size((len(codes), q.shape[1]))
    return QuantizedTensor(codes, scales, q.global_scale, NVFP4, shape)


def _with_dt_rows(name: str, zxbc: PackedLinear, dt_NK: Tensor) -> tuple[PackedLinear, DtRows]:
    """in_proj whole, from the packed rows of in_zxbc and the dt rows."""
    q, amax = zxbc.weight, zxbc.amax
    dt = quantize(dt_NK, NVFP4, amax=amax)
    error = (dt.dequantize() - dt_NK).norm() / dt_NK.norm().clamp(min=1e-30)
    report = DtRows(
        name,
        (len(q.codes), len(q.codes) + len(dt_NK)),
        error.item(),
        int((dt_NK.abs() > amax).sum()),
    )
    scales = [t.view(torch.uint8) for t in (q.scales, dt.scales)]
    joined = _one_row_blocks(
        q, torch.cat([q.codes, dt.codes]), torch.cat(scales).view(torch.float8_e4m3fn)
    )
    return PackedLinear(joined, amax, zxbc.input_amax), report


# ---- The two layouts ----------------------------------------------------------------------------


def packed_tensors(packed: Mapping[str, PackedLinear], layout: str) -> dict[str, Tensor]:
    """The tensors of packed linears, by their names in the layout.

    compressed-tensors divides by its global scales, ModelOpt multiplies with them: `2688 / amax`
    there, `amax / 2688` here.
    """
    tensors: dict[str, Tensor] = {}
    for name, linear in packed.items():
        q, scales = linear.weight, nvfp4_global_scales(linear.input_amax)
        assert q.global_scale is not None
        if layout == COMPRESSED_TENSORS:
            tensors[f"{name}.weight_packed"] = q.codes
            tensors[f"{name}.weight_scale"] = q.scales
            divisor = readable_divisor(linear.encode, q.global_scale)
            tensors[f"{name}.weight_global_scale"] = divisor.reshape(1)
            tensors[f"{name}.input_global_scale"] = scales.encode.reshape(1)
        else:
            tensors[f"{name}.weight"] = q.codes
            tensors[f"{name}.weight_scale"] = q.scales
            tensors[f"{name}.weight_scale_2"] = q.global_scale.reshape(())
            tensors[f"{name}.input_scale"] = scales.decode.reshape(())
    return tensors


def readable_divisor(encode: Tensor, decode: Tensor) -> Tensor:
    """The divisor with which compressed-tensors decodes to the same BF16 values as we do.

    We compute `(code * block scale) * decode`, it `code * (block scale / divisor)`. The products of
    a code and a block scale have 16 different significands, so 16 numbers tell whether both round
    alike. With `encode` they do in all but 5 of 100,000 tensors; there its last bits are changed.
    In 1 of 2 million that does not help, and a few values differ in their last bit: reading the
    export back counts them.
    """
    code = torch.tensor([1.0, 1.5], device=encode.device)
    scale = 1 + torch.arange(8, device=encode.device)[:, None] / 8
    ours = ((code * scale) * decode).bfloat16()
    bits = encode.reshape(1).view(torch.int32)
    for change in (0, 1, -1, 2, -2):
        divisor = (bits + change).view(torch.float32)
        if torch.equal((code * (scale / divisor)).bfloat16(), ours):
            return divisor.reshape(())
    return encode


def quantization_config(packing: Packing, layout: str) -> dict[str, Any]:
    """`quantization_config` of config.json, as the layout's own tools write it."""
    if layout == COMPRESSED_TENSORS:
        return {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": quantization_scheme()},
            "ignore": list(packing.ignored),
            "kv_cache_scheme": None,
        }
    block = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "producer": _PRODUCER,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": block, "input_activations": block}
        },
        "ignore": list(packing.ignored),
    }


def quantization_scheme() -> dict[str, Any]:
    """compressed-tensors' scheme: both operands in NVFP4, the activations' global scale fixed."""
    block = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    return {
        "targets": ["Linear"],
        "weights": {**block, "dynamic": False},
        "input_activations": {**block, "dynamic": "local"},
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }


# Readers tell the layout by the producer's name.
_PRODUCER = {"name": "modelopt", "version": "nvfp4-pretrain"}


def hf_quant_config(packing: Packing) -> dict[str, Any]:
    """ModelOpt's `hf_quant_config.json`."""
    return {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": list(packing.ignored),
        },
    }
