"""Packing of nibbles and the tensor cores' order of block scales."""

from __future__ import annotations

import pytest
import torch

from quant.layout import (
    pack_nibbles,
    swizzle_scales,
    transpose_nibbles,
    unpack_nibbles,
    unswizzle_scales,
)


def scales_of(shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(1, 127, shape, generator=generator, dtype=torch.uint8)
    return values.view(torch.float8_e4m3fn)


def test_a_ramp_packs_to_0x10_first():
    assert pack_nibbles(torch.arange(16, dtype=torch.uint8)).tolist()[:2] == [0x10, 0x32]


def test_unpacking_undoes_packing_for_every_byte():
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(2, 128)
    assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("shape", [(2, 2), (64, 32), (130, 18), (2, 300), (200, 514)])
def test_packed_codes_transpose_as_matrices_do(shape):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    transposed = unpack_nibbles(transpose_nibbles(pack_nibbles(codes)))
    assert torch.equal(transposed, codes.t())


@pytest.mark.parametrize("shape", [(576, 128), (130, 5), (1, 1), (128, 4), (127, 3), (256, 8)])
def test_unswizzle_undoes_swizzle(shape):
    scales = scales_of(shape)
    restored = unswizzle_scales(swizzle_scales(scales), shape)
    assert restored.dtype == scales.dtype
    assert torch.equal(restored.view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize("shape", [(130, 5), (300, 9)])
def test_each_scale_lies_at_its_documented_offset_and_the_padding_is_zero(shape):
    rows, columns = shape
    scales = scales_of(shape).view(torch.uint8)
    swizzled = swizzle_scales(scales)
    column_tiles = -(-columns // 4)
    offsets = set()
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * column_tiles + column // 4
            offset = (tile * 32 + row % 32) * 16 + row % 128 // 32 * 4 + column % 4
            assert swizzled[offset] == scales[row, column]
            offsets.add(offset)
    padding = [i for i in range(len(swizzled)) if i not in offsets]
    assert len(swizzled) == -(-rows // 128) * 128 * column_tiles * 4
    assert not swizzled[padding].any()


def test_swizzling_reads_through_strides():
    scales = scales_of((40, 12)).view(torch.uint8)
    assert torch.equal(swizzle_scales(scales.t()), swizzle_scales(scales.t().contiguous()))


def test_wrong_shapes_and_types_are_refused():
    with pytest.raises(ValueError, match="2 dimensions"):
        swizzle_scales(torch.zeros(2, 3, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="one-byte"):
        swizzle_scales(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="512 values"):
        unswizzle_scales(torch.zeros(511, dtype=torch.uint8), (1, 1))
