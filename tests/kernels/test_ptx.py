"""The inline PTX of every target equals the plain definition that the interpreted kernels use."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernels.e2m1 import encode8_ptx, rs_byte_order
from kernels.hadamard import sign_bits, transform_amax_ptx, transform_ptx
from kernels.philox import philox_ptx, round_keys
from kernels.transpose import transpose8_ptx
from kernels.words import amax16_ptx, row_stats_ptx
from quant.backend import backend
from quant.hadamard import SIGNS, rht_transpose
from quant.rounding import philox, round_e2m1, round_e2m1_stochastic
from tests.kernels.ptx import evaluate

TARGETS = (90, 100, 103, 120)
ONE = np.float32(1).view(np.uint32)


def bits(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.int32).numpy().view(np.uint32)


def grid(fractions: list[int]) -> torch.Tensor:
    """FP32 at these 256ths of every step between two codes, their neighbours, and the extremes."""
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    steps = codes.diff()[:, None] * torch.tensor(fractions) / 256 + codes[:-1, None]
    steps = torch.cat([steps.flatten(), codes[-1:], codes[-1:] + torch.arange(64) / 16])
    near = torch.cat([steps, steps.nextafter(steps - 1), steps.nextafter(steps + 1)])
    extremes = torch.tensor([float("inf"), float("nan"), 1e38, 1e-38, 1e-45, 0.0])
    values = torch.cat([near, extremes])
    return torch.cat([values, -values])


def by_eights(values: torch.Tensor) -> list[np.ndarray]:
    """Eight operands, the values dealt out to them in turn."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % 8))
    return [bits(column) for column in padded.view(-1, 8).t()]


def codes_of(words: np.ndarray) -> np.ndarray:
    return (
        ((words[:, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15).astype(np.uint8).reshape(-1)
    )


@pytest.mark.parametrize("target", TARGETS)
def test_nearest_conversion(target: int):
    values = grid(list(range(256)))
    (words,) = evaluate(encode8_ptx(target, False), [*by_eights(values), ONE, ONE], 1)
    expected = round_e2m1(values).numpy()
    assert np.array_equal(codes_of(words)[: len(values)], expected)


@pytest.mark.parametrize("target", TARGETS)
def test_stochastic_conversion_with_every_random_byte(target: int):
    values = grid([0, 1, 2, 3, 7, 64, 85, 127, 128, 129, 200, 254, 255])
    ptx = encode8_ptx(target, True)
    for byte in range(256):
        # A different byte in each of the four places, so that a wrong order shows.
        places = [(byte + 61 * i) % 256 for i in range(4)]
        random = np.uint32(sum(b << (8 * i) for i, b in enumerate(places)))
        (words,) = evaluate(ptx, [*by_eights(values), ONE, ONE, random, random], 1)
        order = torch.tensor(places, dtype=torch.uint8).repeat(-(-len(values) // 4))
        expected = round_e2m1_stochastic(values, order[: len(values)]).numpy()
        assert np.array_equal(codes_of(words)[: len(values)], expected), byte


def test_the_byte_order_is_a_permutation():
    assert sorted(rs_byte_order() >> (4 * i) & 15 for i in range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_scaling_rounds_after_each_factor_and_hides_negative_zero(target: int, stochastic: bool):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * 4096, generator=generator)
    x *= torch.exp2(torch.randint(-140, 20, x.shape, generator=generator).float())
    x[::5] = -0.0
    first, second = torch.tensor(1.7777e-7), torch.tensor(1.0)
    for a, b in ((first, second), (torch.tensor(2.0**126), torch.tensor(1 / 3))):
        random = np.uint32(0x80FF0140)
        operands = [*by_eights(x), bits(a), bits(b), *[random, random][: 2 * stochastic]]
        (words,) = evaluate(encode8_ptx(target, stochastic), operands, 1)
        y = (x * a) * b
        if stochastic:
            order = torch.tensor([0x40, 0x01, 0xFF, 0x80], dtype=torch.uint8).repeat(len(x) // 4)
            expected = round_e2m1_stochastic(y, order)
        else:
            expected = round_e2m1(y)
        assert np.array_equal(codes_of(words), expected.numpy())


def bf16_inputs() -> torch.Tensor:
    """[16 tokens, 4096] BF16: Gaussian, wide exponents, and any bits."""
    generator = torch.Generator().manual_seed(1)
    gaussian = torch.randn(16, 1024, generator=generator)
    wide = torch.randn(16, 2048, generator=generator)
    wide *= torch.exp2(torch.randint(-60, 60, wide.shape, generator=generator).float())
    anything = torch.randint(-(1 << 15), 1 << 15, (16, 1024), generator=generator)
    anything = anything.to(torch.int16).view(torch.bfloat16).float()
    return torch.cat([gaussian, wide, anything], dim=1).bfloat16()


def words_of(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int32).numpy().view(np.uint32)


SIGN_VECTORS = [
    SIGNS,
    tuple(-s for s in SIGNS),
    (1,) * 16,
    tuple((-1) ** (t * t // 3) for t in range(16)),
]


@pytest.mark.parametrize("target", [90, 100])
@pytest.mark.parametrize("from_words", [True, False], ids=["BF16", "FP32"])
def test_transform(target: int, from_words: bool):
    x = bf16_inputs() if from_words else bf16_inputs().float() * 1.000123
    for signs in SIGN_VECTORS:
        with backend("reference"):
            expected = rht_transpose(x, signs).t().float()
        if from_words:
            inputs = list(words_of(x))
        else:
            inputs = [bits(x[t, half::2]) for t in range(16) for half in (0, 1)]
        results = evaluate(transform_ptx(target, sign_bits(signs), from_words), inputs, 32)
        y = torch.empty_like(expected)
        for t in range(16):
            for half in (0, 1):
                values = torch.from_numpy(results[2 * t + half].view(np.float32))
                y[t, half::2] = values
        same = (y == expected) | (y.isnan() & expected.isnan())
        assert same.all()
        (amax,) = evaluate(transform_amax_ptx(target, sign_bits(signs), from_words), inputs, 1)
        magnitudes = expected.abs().nan_to_num(nan=0.0, posinf=float("inf"))
        pairs = magnitudes.view(16, -1, 2).amax((0, 2)).numpy()
        assert np.array_equal(amax.view(np.float32), pairs)


@pytest.mark.parametrize("target", [90, 100])
def test_amax_passes_over_nan(target: int):
    x = bf16_inputs().float()
    x[:, 7] = float("nan")
    (amax,) = evaluate(amax16_ptx(target), [bits(row) for row in x], 1)
    expected = torch.where(x.isnan(), 0.0, x.abs()).amax(0)
    assert np.array_equal(amax.view(np.float32), expected.numpy())


@pytest.mark.parametrize("from_words", [True, False], ids=["BF16", "FP32"])
def test_row_statistics(from_words: bool):
    x = bf16_inputs()[:8]
    inputs = list(words_of(x)) if from_words else [bits(row) for row in x.float()]
    amax, flags = evaluate(row_stats_ptx(100, from_words), inputs, 2)
    values = x.float().view(8, -1, 2) if from_words else x.float()[..., None]
    expected = torch.where(values.isnan(), 0.0, values.abs()).amax((0, 2))
    assert np.array_equal(amax.view(np.float32), expected.numpy())
    assert np.array_equal(flags != 0, ~values.isfinite().all(2).all(0).numpy())
    assert (flags != 0).any()
    assert (flags == 0).any()


def test_philox():
    key = (0xDEADBEEF, 0x80000001)
    groups = np.arange(1000, dtype=np.uint32) * np.uint32(4294961)
    counter = [np.uint32(c) for c in (0xFFFFFFFF, 7, 0x123456)]
    keys = [np.uint32(k) for k in round_keys(key)]
    found = np.stack(evaluate(philox_ptx(), [groups, *counter, *keys], 4), -1)
    words = [torch.tensor(groups.astype(np.int64)), *(torch.tensor([int(c)]) for c in counter)]
    expected = philox(tuple(words), key)  # type: ignore[arg-type]
    assert np.array_equal(found, expected.numpy().astype(np.uint32))


def test_codes_transpose():
    rows = np.random.default_rng(0).integers(0, 1 << 32, (8, 100), dtype=np.uint32)
    columns = np.stack(evaluate(transpose8_ptx(), list(rows), 8))

    def matrix(words: np.ndarray) -> np.ndarray:
        return (words[:, None] >> (4 * np.arange(8, dtype=np.uint32))[None, :, None]) & 15

    assert np.array_equal(matrix(columns), matrix(rows).transpose(1, 0, 2))
