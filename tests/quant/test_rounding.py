"""Rounding to E2M1 and E4M3, and the random bits: pure functions, right to the bit."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
import torch

from quant.rounding import (
    MAX_ELEMENTS,
    Copy,
    Role,
    RoundingKey,
    e2m1_values,
    philox,
    random_bytes,
    round_e2m1,
    round_e2m1_stochastic,
    round_e4m3,
)
from tests.quant.exact import E2M1, E4M3, nearest_code

KEY = RoundingKey(seed=7, step=3, microbatch=2, layer=5, role=Role.GRADIENT, copy=Copy.ROW)


def every_bf16() -> torch.Tensor:
    """All finite BF16 numbers, in FP32."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16).float()
    return values[values.isfinite()]


# Known answers of philox4x32-10, as the Random123 library publishes them (kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, words):
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert philox((c0, c1, c2, c3), key).tolist() == [list(words)]


def test_an_element_takes_its_byte_of_the_counter_that_the_key_names():
    key = RoundingKey(seed=0x299F31D0A4093822, step=9, microbatch=4, layer=6, role=2, copy=1)
    counter = tuple(torch.tensor([w]) for w in (5, 4, 9, 6 << 8 | 2 << 4 | 1))
    words = philox(counter, (0xA4093822, 0x299F31D0))[0].tolist()
    expected = [byte for word in words for byte in word.to_bytes(4, "little")]
    assert random_bytes(key, 5 * 16, 16).tolist() == expected


@pytest.mark.parametrize(("start", "count"), [(0, 100), (1, 15), (15, 2), (33, 40), (16, 16)])
def test_random_bytes_of_a_part_are_a_part_of_the_whole(start, count):
    whole = random_bytes(KEY, 0, 128)
    assert torch.equal(random_bytes(KEY, start, count), whole[start : start + count])


def test_no_bytes_are_asked_for_and_none_come():
    assert random_bytes(KEY, 17, 0).numel() == 0


def test_the_last_element_of_a_key_has_a_byte_and_the_next_is_refused():
    assert random_bytes(KEY, MAX_ELEMENTS - 1, 1).numel() == 1
    with pytest.raises(ValueError, match="rounding key"):
        random_bytes(KEY, MAX_ELEMENTS, 1)
    with pytest.raises(ValueError, match="rounding key"):
        random_bytes(KEY, -1, 1)


@pytest.mark.parametrize(
    ("field", "bits"),
    [("seed", 64), ("step", 32), ("microbatch", 32), ("layer", 24), ("role", 4), ("copy", 4)],
)
def test_a_key_field_out_of_range_is_refused_by_name(field, bits):
    dataclasses.replace(KEY, **{field: (1 << bits) - 1})
    for value in (1 << bits, -1):
        with pytest.raises(ValueError, match=field):
            dataclasses.replace(KEY, **{field: value})


@pytest.mark.parametrize("field", ["seed", "step", "microbatch", "layer", "role", "copy"])
def test_keys_that_differ_in_one_field_share_no_bits(field):
    other = dataclasses.replace(KEY, **{field: getattr(KEY, field) + 1})
    n = 1 << 16
    pair = torch.stack([random_bytes(k, 0, n).float() for k in (KEY, other)])
    assert abs(torch.corrcoef(pair)[0, 1].item()) < 5 / n**0.5


def test_random_bytes_are_uniform():
    n = 1 << 18
    counts = torch.bincount(random_bytes(KEY, 0, n).int(), minlength=256).double()
    chi_squared = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
    assert 255 - 5 * 510**0.5 < chi_squared < 255 + 5 * 510**0.5


def test_e2m1_of_every_bf16_number_is_the_nearest_with_ties_to_the_even_code():
    y = every_bf16()
    expected = [nearest_code(abs(Fraction(v)), E2M1) + 8 * (v < 0) for v in y.tolist()]
    assert round_e2m1(y).tolist() == expected


@pytest.mark.parametrize("sign", [1, -1])
def test_e2m1_turns_exactly_at_the_midpoints(sign):
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    above = torch.nextafter(midpoints, torch.tensor(9.0))
    below = torch.nextafter(midpoints, torch.tensor(0.0))
    offset = 8 if sign < 0 else 0
    assert (round_e2m1(sign * below) - offset).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert (round_e2m1(sign * midpoints) - offset).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert (round_e2m1(sign * above) - offset).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_e2m1_saturates_and_takes_nan_for_six_and_minus_zero_for_zero():
    y = torch.tensor([6.0, 7.0, 1e30, torch.inf, -torch.inf, torch.nan, 0.0, -0.0, -1e-30])
    codes = [7, 7, 7, 7, 15, 7, 0, 0, 8]
    assert round_e2m1(y).tolist() == codes
    assert round_e2m1_stochastic(y, torch.zeros(9, dtype=torch.uint8)).tolist() == codes


def test_stochastic_e2m1_rounds_up_when_fraction_plus_random_reaches_one():
    y = every_bf16()
    y = y[(y.abs() > 2**-12) & (y.abs() < 8)]
    for random in (0, 1, 100, 128, 255):
        codes = round_e2m1_stochastic(y, torch.full(y.shape, random, dtype=torch.uint8))
        expected = []
        for value in y.tolist():
            a = min(abs(Fraction(value)), Fraction(6))
            lower = max(i for i in range(8) if E2M1[i] <= a)
            step = E2M1[lower + 1] - E2M1[lower] if lower < 7 else Fraction(2)
            up = (256 * (a - E2M1[lower]) / step) // 1 + random >= 256
            expected.append(lower + up + 8 * (value < 0))
        assert codes.tolist() == expected


def test_stochastic_e2m1_keeps_fractions_that_a_sum_would_round_away():
    y = torch.nextafter(torch.tensor([3.0, 4.0, 6.0]), torch.tensor(0.0))  # 255 of 256 parts up
    assert round_e2m1_stochastic(y, torch.zeros(3, dtype=torch.uint8)).tolist() == [4, 5, 6]
    assert round_e2m1_stochastic(y, torch.ones(3, dtype=torch.uint8)).tolist() == [5, 6, 7]


def test_stochastic_e2m1_leaves_the_numbers_of_the_format_alone():
    codes = torch.arange(16, dtype=torch.uint8)[torch.arange(16) != 8]
    for random in (0, 255):
        r = torch.full(codes.shape, random, dtype=torch.uint8)
        assert torch.equal(round_e2m1_stochastic(e2m1_values(codes), r), codes)


def test_e4m3_of_every_bf16_number_is_the_nearest_with_ties_to_the_even_code():
    y = every_bf16()
    codes = round_e4m3(y).view(torch.uint8)
    expected = [nearest_code(abs(Fraction(v)), E4M3) for v in y.tolist()]
    assert (codes & 127).tolist() == expected
    assert torch.equal(codes >= 128, torch.signbit(y))


def test_e4m3_keeps_each_of_its_own_numbers():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes = codes[(codes & 127) < 127]
    values = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(round_e4m3(values).view(torch.uint8), codes)


def test_e4m3_saturates_where_casts_give_nan():
    y = torch.tensor([448.0, 460.0, 464.0, 465.0, 480.0, 1000.0, torch.inf])
    assert round_e4m3(y).float().tolist() == [448.0] * 7
    assert round_e4m3(-y).float().tolist() == [-448.0] * 7
    assert round_e4m3(torch.tensor(torch.nan)).float().isnan()
