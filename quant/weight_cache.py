"""The quantized copies of a weight, made once per optimizer step.

Legend: K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from quant.copies import quantize_weight
from quant.formats import Format
from quant.quantize import QuantizedTensor, quantize


class WeightCache:
    """The quantized copies of one weight.

    A copy is made at its first use. All are dropped as soon as the weight is another: changed in
    place (an optimizer step, a load), replaced, moved, or used in another step. A caller that
    rewrites a weight behind autograd's version counter, as FSDP2's all-gather does, calls `clear`.

    Only codes and scales are kept: in NVFP4 0.56 bytes an element, twice that where Dgrad's blocks
    lie along another dimension (1-D formats). The emulated GEMM decodes them at each use, at about
    2% of its own time on a CPU with 1024 tokens.
    """

    def __init__(self) -> None:
        self._key: Hashable = None
        self._weight: Tensor | None = None
        self._copies: dict[tuple[Format, bool], QuantizedTensor] = {}

    def clear(self) -> None:
        """Drop all copies."""
        self._key = self._weight = None
        self._copies = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the copies hold."""
        return sum(copy.nbytes for copy in self._copies.values())

    def get(
        self,
        w_NK: Tensor,
        format: Format,
        *,
        along_n: bool,
        step: int | None,
        swizzled: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[QuantizedTensor, bool]:
        """The quantized weight, and whether it was quantized just now.

        Args:
            w_NK: FP32 or BF16.
            along_n: True for the transposed weight [K, N], with its blocks along N.
            step: the optimizer step.
            swizzled: keep the block scales as tensor cores read them; and of square blocks, the
                transposed copy beside the other, as one pass makes both.
            dtype: what the weight is rounded to first.
        """
        key = (step, w_NK.data_ptr(), w_NK._version, w_NK.shape, w_NK.dtype)
        if key != self._key:
            self.clear()
            # Held, so that no other weight can take its address and pass for it.
            self._key, self._weight = key, w_NK.detach()
        slot = (format, along_n)
        made = slot not in self._copies
        if not made:
            return self._copies[slot], made
        if dtype != torch.float32:
            w_NK = w_NK.detach().to(dtype)
        if swizzled and format.is_2d:
            pair = quantize_weight(w_NK, format, swizzled=True)
            self._copies[format, False], self._copies[format, True] = pair
        else:
            source = w_NK.t() if along_n else w_NK
            self._copies[slot] = quantize(source, format, swizzled=swizzled)
        return self._copies[slot], made
