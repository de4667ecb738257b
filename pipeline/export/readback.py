"""Reading an export again: what stands on disk is the model, to the bit.

Our own reader decides. Where the public compressed-tensors package is installed, it decodes the
packed weights too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import ModelConfig
from model.hf import from_nemotron_h
from pipeline.export.packing import COMPRESSED_TENSORS, PackedLinear, quantization_scheme
from pipeline.hf_folder import read_model_config, read_tensors

PACKED_NAMES = {
    "nvfp4-compressed-tensors": (
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
        "input_global_scale",
    ),
    "nvfp4-modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
}


class ReadBackError(RuntimeError):
    """What was written is not what should have been: a fault of the disk, or of this program."""


def check(
    folder: Path,
    config: ModelConfig,
    state: Mapping[str, Tensor],
    written: Mapping[str, Tensor],
    packed: Mapping[str, PackedLinear],
    layout: str,
) -> dict[str, Any]:
    """Read the folder and compare every tensor to the bit. Returns what was compared.

    Args:
        config: the checkpoint's architecture.
        state: the checkpoint's tensors, by our names.
        written: what was to be written, by public names.
        packed: the packed linears among it.

    Raises:
        ReadBackError: with the name of what differs.
    """
    if read_model_config(folder) != config:
        raise ReadBackError(f"{folder}: config.json reads as another model")
    tensors = read_tensors(folder)
    for name in sorted(tensors.keys() | written.keys()):
        if name not in tensors or name not in written or not _same(tensors[name], written[name]):
            raise ReadBackError(f"{folder}: {name} is not what was written")
    decoded = dict(tensors)
    for name, linear in packed.items():
        stored = [decoded.pop(f"{name}.{part}") for part in PACKED_NAMES[layout]]
        decoded[f"{name}.weight"] = stored[0].new_zeros(linear.weight.shape)
    ours = from_nemotron_h(decoded, config)
    untouched = [name for name, tensor in state.items() if ours[name].is_floating_point()]
    for name in untouched:
        if not torch.equal(ours[name], state[name].to(ours[name].dtype)):
            raise ReadBackError(f"{folder}: {name} is not what the checkpoint holds")
    result: dict[str, Any] = {"tensors": len(tensors), "packed": len(packed), "equal": True}
    if packed and layout == COMPRESSED_TENSORS:
        result |= _with_public_package(tensors, packed)
    return result


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal in type, shape and every bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(t.contiguous().cpu().flatten().view(torch.uint8) for t in (one, other)))


def _with_public_package(
    tensors: Mapping[str, Tensor], packed: Mapping[str, PackedLinear]
) -> dict[str, Any]:
    """Decode with compressed-tensors and count the BF16 values that differ from ours."""
    if importlib.util.find_spec("compressed_tensors") is None:
        return {"reader": "compressed-tensors is not installed; our own reader alone"}
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(**quantization_scheme())
    differing = 0
    for name, linear in packed.items():
        stored = {part: tensors[f"{name}.{part}"] for part in PACKED_NAMES[COMPRESSED_TENSORS]}
        theirs = NVFP4PackedCompressor.decompress(stored, scheme)["weight"]
        differing += int((theirs != linear.weight.dequantize(theirs.dtype).cpu()).sum())
    return {
        "reader": f"compressed-tensors {version('compressed-tensors')}",
        "values_that_differ": differing,
    }
