"""The quantized copies of a weight, made once per optimizer step.

Legend: K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from quant.formats import Format
from quant.gemm import Factor, decode
from quant.quantize import quantize


class WeightCache:
    """The quantized copies of one weight: a whole one, or one rank's shard of it.

    A copy is made at its first use. All are dropped as soon as the weight is another: changed in
    place (an optimizer step, a load), moved, or used in another step. A caller that rewrites a
    weight behind autograd's version counter, as FSDP2's all-gather does, calls `clear`.

    Memory: the copies for Fprop, and for Dgrad in a format of square blocks, are one tensor, kept
    decoded to BF16 since decoding costs as much as a small GEMM. A Dgrad copy of its own (1-D
    blocks) is kept as codes. So at most the weight's size in BF16, and its codes once.
    """

    def __init__(self) -> None:
        self._key: Hashable = None
        self._weight: Tensor | None = None
        self._copies: dict[tuple[str, bool], Factor] = {}

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
        transposed: bool,
        step: int | None,
        amax: Tensor | None = None,
        keep_codes: bool = False,
    ) -> tuple[Factor, bool]:
        """The weight as a GEMM operand, and whether it was quantized just now.

        Args:
            w_NK: FP32 or BF16.
            transposed: False for Fprop's [N, K], True for Dgrad's [K, N].
            step: the optimizer step.
            amax: FP32 scalar of the whole weight where `w_NK` is a shard of it.
            keep_codes: for a backend that multiplies codes.
        """
        key = (step, w_NK.data_ptr(), w_NK._version, w_NK.shape, w_NK.dtype, _identity(amax))
        if key != self._key:
            self.clear()
            # Held, so that no other weight can take its address and pass for it.
            self._key, self._weight = key, w_NK.detach()
        flip = transposed and format.is_2d
        along_n = transposed and not flip
        slot = (format.name, along_n)
        made = slot not in self._copies
        if made:
            q = quantize(w_NK.t() if along_n else w_NK, format, amax=amax)
            self._copies[slot] = q if keep_codes or along_n else decode(q)
        copy = self._copies[slot]
        return (copy.transpose() if flip else copy), made


def _identity(amax: Tensor | None) -> Hashable:
    """Tells one given amax from another without reading it."""
    return None if amax is None else (amax.data_ptr(), amax._version)
