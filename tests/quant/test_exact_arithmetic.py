"""The quantizers against oracles in exact rational arithmetic, where random data never looks.

Formulas that are equal on paper, `(b / 6) * S_enc` for one, differ in about 0.1% of pairs of
tensor amax and block amax, and on no Gaussian tensor. Hence the sweeps.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.formats import FORMATS, NVFP4, NVFP4_2D, Format
from quant.layout import unpack_nibbles
from quant.quantize import quantize
from tests.quant.exact import (
    E2M1,
    E4M3,
    FLOAT_MAX,
    Short,
    ceil_log2,
    fp32,
    nearest_code,
    nvfp4_encode_table,
    nvfp4_scalars,
)

pytestmark = pytest.mark.usefixtures("implementation")


def positive_bf16(exponent: np.ndarray, generator: np.random.Generator) -> Short:
    """Random BF16 numbers of given binades."""
    return Short(generator.integers(128, 256, exponent.shape), exponent - 7)


def tensor(values: Short) -> Tensor:
    return torch.from_numpy(np.ldexp(values.mantissa.astype(np.float64), values.exponent)).float()


def sweep(num_amax: int, num_blocks: int, seed: int) -> tuple[int, int]:
    """Compare blocks of 16 under many tensor amaxes; counts blocks and those near another formula.

    Returns:
        how many pairs of (tensor amax, block amax) were compared, and in how many of them
        `(b / 6) * S_enc` would have given another scale.
    """
    generator = np.random.default_rng(seed)
    told_apart = 0
    for _ in range(num_amax):
        amax_exponent = int(generator.integers(-60, 60))
        amax = Fraction(int(generator.integers(128, 256))) * Fraction(2) ** (amax_exponent - 7)
        binades = amax_exponent - 1 - generator.geometric(0.25, num_blocks).clip(max=24)
        block = positive_bf16(binades, generator)
        lower = binades[:, None] - generator.integers(1, 5, (num_blocks, 15))
        x = Short(
            np.concatenate([block.mantissa[:, None], generator.integers(128, 256, lower.shape)], 1),
            np.concatenate([block.exponent[:, None], lower - 7], 1),
        )
        encode, decode, multiplier = nvfp4_scalars(amax)
        scale = (block * Short.of([multiplier])).rounded(24).code(3, -6, 126)
        sixth = (block * Short.of([fp32(Fraction(1, 6))])).rounded(24)
        other = (sixth.rounded(24) * Short.of([encode])).rounded(24).code(3, -6, 126)
        told_apart += int((scale != other).sum())
        factor = Short.of(nvfp4_encode_table(decode))[scale]
        y = (x * Short(factor.mantissa[:, None], factor.exponent[:, None])).rounded(24)
        codes = y.code(1, 0, 7)
        q = quantize(tensor(x).bfloat16(), NVFP4, amax=torch.tensor(float(amax)))
        assert np.array_equal(q.scales.view(torch.uint8).flatten().numpy(), scale)
        assert np.array_equal(unpack_nibbles(q.codes).numpy(), codes)
    return num_amax * num_blocks, told_apart


def test_pairs_of_amaxes_give_the_exact_bytes():
    compared, told_apart = sweep(num_amax=100, num_blocks=300, seed=0)
    assert compared == 30_000
    assert told_apart > 5


@pytest.mark.slow
def test_a_million_pairs_of_amaxes_give_the_exact_bytes():
    compared, told_apart = sweep(num_amax=1000, num_blocks=1100, seed=1)
    assert compared >= 10**6
    assert told_apart > 500


def test_the_amax_pairs_of_all_bf16_mantissas_give_the_exact_scale():
    mantissas = np.arange(128, 256)
    block = Short(mantissas, np.full(128, -8))
    x = torch.zeros(128, 16)
    x[:, 0] = tensor(block)
    for mantissa in mantissas:
        _, _, multiplier = nvfp4_scalars(Fraction(int(mantissa), 128))
        scale = (block * Short.of([multiplier])).rounded(24).code(3, -6, 126)
        q = quantize(x, NVFP4, amax=torch.tensor(mantissa / 128))
        assert np.array_equal(q.scales.view(torch.uint8).flatten().numpy(), scale)


def test_tiny_tensors_follow_the_exact_rule_down_to_the_smallest_number():
    for exponent in (*range(-149, -100, 3), -148, -132, -131, -126, -120):
        amax = Fraction(1 + (exponent % 2) * Fraction(1, 2)) * Fraction(2) ** exponent
        x = torch.tensor([float(amax) * k / 16 for k in range(1, 17)])
        amax = Fraction(x.max().item())
        if amax == 0:
            continue
        encode, decode, multiplier = nvfp4_scalars(amax)
        scale = nearest_code(fp32(amax * multiplier), E4M3)
        q = quantize(x, NVFP4)
        assert Fraction(q.global_scale.item()) == decode
        assert q.scales.view(torch.uint8).item() == scale
        for value, code in zip(x.tolist(), unpack_nibbles(q.codes).tolist(), strict=True):
            assert code == exact_code(Fraction(value), E4M3[scale], encode, decode)


def exact_code(x: Fraction, scale: Fraction, encode: Fraction, decode: Fraction) -> int:
    """The code of a positive number, with S_enc split off where it is capped."""
    first, rest = (encode, Fraction(1)) if encode == Fraction(2) ** 126 else (Fraction(1), decode)
    product = fp32(scale * rest)
    factor = min(fp32(1 / product), FLOAT_MAX) if product else FLOAT_MAX
    return nearest_code(fp32(x * first * factor), E2M1)


@pytest.mark.parametrize("format", [NVFP4, NVFP4_2D], ids=lambda f: f.name)
def test_every_bf16_number_under_fixed_scales_gets_its_exact_code(format):
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = bits[bits.isfinite()].reshape(-1, 16)
    amax = Fraction(2688)
    q = quantize(x, format, amax=torch.tensor(2688.0))
    encode, decode, multiplier = nvfp4_scalars(amax)
    assert encode == decode == 1
    height = format.block[0]
    blocks = x.float().abs().reshape(-1, height * 16).amax(1).repeat_interleave(height)
    codes = unpack_nibbles(q.codes)
    factors = nvfp4_encode_table(decode)
    limit = fp32(Fraction(448) / multiplier)
    for row in range(0, len(x), 7):
        block = Fraction(blocks[row].item())
        scale = 126 if block > limit else nearest_code(fp32(block * multiplier), E4M3)
        assert q.scales[row].view(torch.uint8).item() == scale
        for value, code in zip(x[row].tolist(), codes[row].tolist(), strict=True):
            y = abs(Fraction(value)) * factors[scale]
            expected = 7 if y > 6 else nearest_code(fp32(y), E2M1)
            assert code == expected + 8 * (value < 0 and y > 0)


def block_values(format: Format, seed: int) -> Tensor:
    """FP32 values of one block, over many binades, with zeros and both signs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (format.block[0], format.block[1])
    x = torch.randn(shape, generator=generator) * 2.0 ** (seed * 9 % 100 - 50)
    x *= torch.exp2(torch.randint(-14, 1, shape, generator=generator).float())
    x[torch.rand(shape, generator=generator) < 0.05] = 0.0
    return x


@pytest.mark.parametrize("name", ["fp8_block", "fp8_block_free", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("seed", range(8))
def test_one_block_of_an_8_bit_or_mx_format_gets_its_exact_bytes(name, seed):
    format = FORMATS[name]
    x = block_values(format, seed)
    table = E4M3 if format.element == "e4m3" else E2M1
    amax = Fraction(x.abs().max().item())
    free = name.endswith("free")
    scale = fp32(amax / 448) if free else Fraction(2) ** ceil_log2(amax / table[-1])
    q = quantize(x, format)
    assert Fraction(q.scales.float().item()) == scale
    codes = q.codes if format.element == "e4m3" else unpack_nibbles(q.codes)
    sign = len(table) + (table is E4M3)
    for value, code in zip(x.flatten().tolist(), codes.flatten().tolist(), strict=True):
        expected = nearest_code(fp32(abs(Fraction(value)) / scale), table)
        assert code == expected + sign * (value < 0)


def test_a_large_fp8_block_gets_its_exact_bytes():
    format = FORMATS["fp8_block_2d"]
    x = block_values(format, seed=3)
    scale = Fraction(2) ** ceil_log2(Fraction(x.abs().max().item()) / 448)
    q = quantize(x, format)
    assert (q.scales == float(scale)).all()
    sample = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))[:2000]
    for value, code in zip(
        x.flatten()[sample].tolist(), q.codes.flatten()[sample].tolist(), strict=True
    ):
        assert code == nearest_code(abs(Fraction(value)) / scale, E4M3) + 128 * (value < 0)


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "mxfp4"])
def test_a_scale_turns_exactly_at_the_largest_code_times_a_power_of_two(name):
    format = FORMATS[name]
    edge = torch.tensor(format.element_max * 2.0**-7)
    x = torch.zeros(3, format.block[1])
    x[0, 0] = edge
    x[1, 0] = torch.nextafter(edge, torch.tensor(torch.inf))
    x[2, 0] = torch.nextafter(edge, torch.tensor(0.0))
    assert quantize(x, format).scales.float().flatten().tolist() == [2.0**-7, 2.0**-6, 2.0**-7]
