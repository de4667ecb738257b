"""NVFP4 of BF16 by nearest rounding on the CPU, where codes come from comparing 16-bit integers.

Every test compares bytes with plain torch, which multiplies and rounds in FP32. What could differ
is the bound at which one code gives way to the next, so inputs lie on and next to the bounds.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import cpu
from quant.backend import backend
from quant.formats import NVFP4, NVFP4_2D, Format
from quant.quantize import amax_and_nonfinite, quantize
from quant.reference import nvfp4_global_scales
from quant.rounding import round_e4m3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cpu.available(), reason=f"no CPU kernels: {cpu.reason()}"),
]

FORMATS = pytest.mark.parametrize("format", [NVFP4, NVFP4_2D], ids=lambda f: f.name)
COLUMNS = 1024 + 3 * 128 + 32  # one whole step of the kernel, a part of one, and less than a group
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def assert_equal_bytes(x: Tensor, format: Format, amax: Tensor | None = None) -> None:
    made = {}
    for name in ("reference", "cpu"):
        with backend(name):  # type: ignore[arg-type]
            made[name] = quantize(x, format, amax=amax)
    a, b = made["reference"], made["cpu"]
    assert torch.equal(a.scales.view(torch.uint8), b.scales.view(torch.uint8))
    assert torch.equal(a.codes, b.codes)


def bf16(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def bits_of(x: Tensor) -> Tensor:
    return x.view(torch.int16).int()


def in_rows(x: Tensor, rows: int = 16) -> Tensor:
    """Elements as a matrix of COLUMNS columns and a multiple of `rows` rows, zeros at the end."""
    x = x.flatten()
    return torch.nn.functional.pad(x, (0, -len(x) % (rows * COLUMNS))).view(-1, COLUMNS)


def block_amaxes() -> Tensor:
    """Every BF16 mantissa, over the exponents at which scales are normal, subnormal and zero."""
    mantissas = torch.arange(128)
    exponents = 127 + torch.tensor([0, 0, -1, -2, -3, -8, -14, -16, -18, -20, -24])
    return bf16((exponents[:, None] * 128 + mantissas).flatten())


def beside_bounds(block_amax: Tensor, tensor_amax: Tensor) -> Tensor:
    """Blocks of 16 that hold their amax and the BF16 numbers nearest to one midpoint, both signs.

    Whichever way the bound there moves by one BF16 number, a code changes.
    """
    scales = nvfp4_global_scales(tensor_amax)
    sf = round_e4m3((block_amax.float() * scales.block).clamp(max=torch.finfo().max)).float()
    near = bits_of((MIDPOINTS * (sf * scales.rest)[:, None]).bfloat16())
    near = near[..., None] + torch.arange(-3, 4)  # [blocks, midpoints, 7]
    near = near.clamp(torch.tensor(0), bits_of(block_amax)[:, None, None])
    both_signs = torch.cat([near, near | -0x8000], dim=-1)
    amax = bits_of(block_amax)[:, None, None].expand(-1, len(MIDPOINTS), 2)
    return bf16(torch.cat([amax, both_signs], dim=-1))


@FORMATS
@pytest.mark.parametrize("exponent", [-112, -100, -30, -1, 0, 1, 8, 17, 18, 22, 40, 120])
def test_codes_change_exactly_at_the_bounds(format: Format, exponent: int):
    for mantissa in (1.0, 1.3125, 1.5, 1.9921875):  # 1.3125 = 2688 / 2^11: a power of two as S_enc
        tensor_amax = torch.tensor(mantissa * 2.0**exponent)
        block_amax = (block_amaxes().double() * 2.0**exponent).bfloat16()
        block_amax = block_amax[block_amax.float() <= tensor_amax]
        units = beside_bounds(block_amax, tensor_amax).view(-1, 16)
        if format is NVFP4_2D:  # the rows of a square are alike but for their order
            shift = (torch.arange(16)[:, None] + torch.arange(16)) % 16
            units = units[:, shift].transpose(0, 1).reshape(16, -1)
            units = torch.nn.functional.pad(units, (0, -units.shape[1] % 128))
            assert_equal_bytes(units, format, tensor_amax)
        else:
            assert_equal_bytes(in_rows(units), format, tensor_amax)


@FORMATS
@pytest.mark.parametrize("exponent", range(-126, 128, 6))
def test_every_bf16_number_gets_its_code_at_every_scale(format: Format, exponent: int):
    """Sorted, so that blocks hold neighbours, and shuffled, so that they hold everything."""
    numbers = bf16(torch.arange(1 << 16))
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(exponent + 200))
    for x in (in_rows(numbers), in_rows(numbers[order])):
        assert_equal_bytes(x, format, torch.tensor(1.7 * 2.0**exponent))


@FORMATS
def test_blocks_of_any_two_magnitudes_share_a_group(format: Format):
    """From zeros over sf = 0 (codes saturate) to the largest; the kernel does some in FP32."""
    generator = torch.Generator().manual_seed(0)
    for spread in (4, 30, 80, 250):
        x = torch.randn(64, COLUMNS // 16, 16, generator=generator)
        exponents = torch.randint(-spread, 1, (64 // 16, COLUMNS // 16), generator=generator)
        x = torch.ldexp(x, exponents.repeat_interleave(16, 0)[:, :, None] + spread // 2)
        x = (x * (torch.rand(x.shape, generator=generator) < 0.8)).bfloat16()
        x[:, ::7] = -0.0
        assert_equal_bytes(x.flatten(1), format)


@FORMATS
@pytest.mark.parametrize("bits", [0x7F80, 0x7F81, 0x7FC0, 0x7FFF])
@pytest.mark.parametrize("sign", [0, -0x8000])
def test_infinity_and_any_nan_spare_their_neighbours(format: Format, bits: int, sign: int):
    x = torch.randn(32, COLUMNS, generator=torch.Generator().manual_seed(bits)).bfloat16()
    for row, column in ((0, 0), (1, 127), (17, 128), (20, 1040), (31, COLUMNS - 1)):
        x[row, column] = bf16(torch.tensor(bits + sign))
    assert_equal_bytes(x, format, torch.tensor(3.0))
    assert_equal_bytes(x, format)


@FORMATS
@pytest.mark.parametrize("exponent", range(14, 26))
def test_a_negative_number_whose_product_underflows_has_no_sign(format: Format, exponent: int):
    """-2^-133 times 2^-17 rounds to -0, whose code is that of 0; times 2^-16 it does not."""
    x = bf16(-0x8000 + torch.arange(16 * COLUMNS).view(16, COLUMNS) % 5)
    x[:, ::16] = 6 * 2.0**exponent
    for tensor_amax in (6 * 2.0**exponent, 2688 * 2.0**exponent, 2688.0 * 2.0 ** (exponent - 9)):
        assert_equal_bytes(x, format, torch.tensor(tensor_amax))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_one_element_that_is_not_finite_is_counted_wherever_it_is(dtype: torch.dtype, value: float):
    x = torch.linspace(-2, 1, 1100).to(dtype)
    for position in range(0, len(x), 9):
        changed = x.clone()
        changed[position] = value
        changed[-1 - position] = -3.0
        amax, nonfinite = amax_and_nonfinite(changed)
        assert nonfinite == 1
        assert amax == (torch.inf if abs(value) == torch.inf else 3)


@FORMATS
@pytest.mark.parametrize("columns", [2, 126, 128, 130, 256, 1022, 1024, 1152, 2048, 2178])
def test_rows_of_any_length_and_number(format: Format, columns: int):
    for rows in (1, 15, 16, 17, 33):
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
        assert_equal_bytes(x.bfloat16(), format)
