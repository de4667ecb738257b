"""Formats: what the constants say about elements, blocks and scales."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quant.formats import E2M1_VALUES, FORMATS, FP8_BLOCK_2D, MXFP4, MXFP8, NVFP4, NVFP4_2D


@pytest.mark.parametrize(
    ("name", "block", "element_bits", "scale_dtype", "has_global_scale"),
    [
        ("nvfp4", (1, 16), 4, torch.float8_e4m3fn, True),
        ("nvfp4_2d", (16, 16), 4, torch.float8_e4m3fn, True),
        ("mxfp4", (1, 32), 4, torch.float8_e8m0fnu, False),
        ("mxfp8", (1, 32), 8, torch.float8_e8m0fnu, False),
        ("fp8_block", (1, 128), 8, torch.float32, False),
        ("fp8_block_2d", (128, 128), 8, torch.float32, False),
    ],
)
def test_each_format_is_the_papers(name, block, element_bits, scale_dtype, has_global_scale):
    format = FORMATS[name]
    assert format.block == block
    assert format.element_bits == element_bits
    assert format.scale_dtype == scale_dtype
    assert format.has_global_scale == has_global_scale


def test_formats_are_keyed_by_their_own_names():
    assert all(name == format.name for name, format in FORMATS.items())


def test_mx_scales_round_up_unless_floor_is_asked_for():
    assert MXFP4.scale_rounding == MXFP8.scale_rounding == "up"
    assert FORMATS["mxfp4_floor"] == dataclasses.replace(
        MXFP4, name="mxfp4_floor", scale_rounding="floor"
    )


def test_only_two_dimensional_blocks_transpose_without_rounding():
    assert NVFP4_2D.is_2d
    assert FP8_BLOCK_2D.is_2d
    assert not any(f.is_2d for f in (NVFP4, MXFP4, MXFP8))


def test_e2m1_magnitudes_are_those_of_two_exponent_bits_and_one_mantissa_bit():
    subnormal = [m / 2 for m in (0, 1)]
    normal = [2.0 ** (e - 1) * (1 + m / 2) for e in (1, 2, 3) for m in (0, 1)]
    assert list(E2M1_VALUES) == subnormal + normal
