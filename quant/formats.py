"""Block-scaled number formats: what an element is, what shares a scale, and what the scale is.

A tensor is stored as small codes. Every block of neighbours shares one block scale, and NVFP4 adds
one FP32 scale for the whole tensor on top. A value is `code * block scale * global scale`.

Sources: NVFP4, arXiv 2509.25149; MX formats, OCP Microscaling Formats specification 1.0; FP8
blocks, DeepSeek-V3, arXiv 2412.19437.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

Element = Literal["e2m1", "e4m3"]
Scale = Literal["e4m3", "e8m0", "fp32"]
ScaleRounding = Literal["nearest", "up", "floor"]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the E2M1 codes 0..7; bit 3 of a code is the sign."""

ELEMENT_MAX: dict[Element, float] = {"e2m1": 6.0, "e4m3": 448.0}
"""Largest finite magnitude of each element type."""

_SCALE_DTYPES: dict[Scale, torch.dtype] = {
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
    "fp32": torch.float32,
}


@dataclass(frozen=True)
class Format:
    """One block-scaled format.

    Attributes:
        name: the key in `FORMATS`, and what recipes write.
        element: type of one code, "e2m1" (4 bits) or "e4m3" (8 bits).
        block: (rows, columns) that share one block scale.
        scale: type of a block scale, "e4m3", "e8m0" or "fp32".
        has_global_scale: whether one FP32 scale for the whole tensor sits above the block scales.
        scale_rounding: how a block scale is rounded from the block's amax.
            "nearest": to the nearest value that the scale's type holds (E4M3, or free FP32);
            "up": to the next power of two, so that nothing clips;
            "floor": to the power of two that OCP prescribes, which clips up to a factor 2.
    """

    name: str
    element: Element
    block: tuple[int, int]
    scale: Scale
    has_global_scale: bool = False
    scale_rounding: ScaleRounding = "nearest"

    @property
    def element_bits(self) -> int:
        """Bits of one code: 4 or 8."""
        return 4 if self.element == "e2m1" else 8

    @property
    def element_max(self) -> float:
        """Largest magnitude of one code: 6 or 448."""
        return ELEMENT_MAX[self.element]

    @property
    def scale_dtype(self) -> torch.dtype:
        """Torch type of the stored block scales."""
        return _SCALE_DTYPES[self.scale]

    @property
    def is_2d(self) -> bool:
        """Whether a block spans several rows, so that a transpose needs no new rounding."""
        return self.block[0] > 1


NVFP4 = Format("nvfp4", "e2m1", (1, 16), "e4m3", has_global_scale=True)
NVFP4_2D = replace(NVFP4, name="nvfp4_2d", block=(16, 16))
MXFP4 = Format("mxfp4", "e2m1", (1, 32), "e8m0", scale_rounding="up")
MXFP4_FLOOR = replace(MXFP4, name="mxfp4_floor", scale_rounding="floor")
MXFP8 = replace(MXFP4, name="mxfp8", element="e4m3")
MXFP8_FLOOR = replace(MXFP8, name="mxfp8_floor", scale_rounding="floor")
FP8_BLOCK = Format("fp8_block", "e4m3", (1, 128), "fp32", scale_rounding="up")
FP8_BLOCK_2D = replace(FP8_BLOCK, name="fp8_block_2d", block=(128, 128))
FP8_BLOCK_FREE = replace(FP8_BLOCK, name="fp8_block_free", scale_rounding="nearest")
FP8_BLOCK_2D_FREE = replace(FP8_BLOCK_2D, name="fp8_block_2d_free", scale_rounding="nearest")

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        NVFP4,
        NVFP4_2D,
        MXFP4,
        MXFP4_FLOOR,
        MXFP8,
        MXFP8_FLOOR,
        FP8_BLOCK,
        FP8_BLOCK_2D,
        FP8_BLOCK_FREE,
        FP8_BLOCK_2D_FREE,
    )
}
"""Every format by its name."""
