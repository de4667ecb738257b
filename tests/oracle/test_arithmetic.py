"""The oracle's own foundations: published vectors and bytes that other programs produced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.oracle import numbers, quantizers
from tests.oracle.philox import COLUMN, GRADIENT, Key, philox4x32_10

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ONES,) * 4, (ONES,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: str
) -> None:
    assert " ".join(f"{word:08x}" for word in philox4x32_10(counter, key)) == expected


def test_the_bytes_of_a_matrix_are_those_of_its_elements_in_row_major_order() -> None:
    key = Key(2**40 + 3, 7, 1, 5, GRADIENT, COLUMN)
    matrix = key.bytes(3, 10)
    assert all(matrix[r, c] == key.byte(10 * r + c) for r in range(3) for c in range(10))


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert numbers.E2M1[numbers.e2m1_nearest(ties)].tolist() == [0, 1, 1, 2, 2, 4, 4]


def test_stochastic_rounding_goes_up_in_as_many_of_256_cases_as_the_fraction_says() -> None:
    random = np.arange(256)
    for value, low, high, ups in [(0.25, 0, 1, 128), (2.1, 4, 5, 25), (5.999, 6, 7, 255)]:
        codes = numbers.e2m1_stochastic(np.full(256, value), random)
        assert set(codes) == {low, high}
        assert (codes == high).sum() == ups
    for exact in numbers.E2M1:
        assert set(numbers.E2M1[numbers.e2m1_stochastic(np.full(256, exact), random)]) == {exact}


def test_rounding_to_bf16_and_e4m3_is_torch_s_cast_on_all_their_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2**31, (4000,), generator=generator).to(torch.int32)
    wide = bits.view(torch.float32)
    wide = wide[wide.isfinite() & (wide.abs() < 1e38)]
    assert torch.equal(
        wide.bfloat16().double(), torch.from_numpy(numbers.bf16(wide.double().numpy()))
    )
    small = torch.linspace(-450, 450, 9001) * torch.exp2(torch.arange(9001) % 18 - 17)
    cast = small.clamp(-448, 448).to(torch.float8_e4m3fn)
    mine = numbers.e4m3(small.double().numpy())
    assert torch.equal(cast.double(), torch.from_numpy(mine))
    assert (cast.view(torch.uint8).numpy() == numbers.e4m3_byte(mine)).all()


@pytest.fixture(scope="module")
def te(shared: Path) -> dict[str, torch.Tensor]:
    return load_file(shared / "golden" / "nvfp4_te_reference.safetensors")


def equal(mine: np.ndarray | None, other: np.ndarray | None) -> bool:
    assert mine is not None
    assert other is not None
    return np.array_equal(mine, other)


def names(golden: dict[str, torch.Tensor]) -> list[str]:
    return [name.removesuffix(".x") for name in golden if name.endswith(".x")]


def test_nvfp4_gives_transformer_engine_s_bytes(te: dict[str, torch.Tensor]) -> None:
    for name in names(te):
        x = te[f"{name}.x"].float().numpy()
        for kind, rows in (("1d", 1), ("2d", 16)):
            made = quantizers.nvfp4(x, block_rows=rows)
            assert equal(made.codes, te[f"{name}.{kind}.codes"].numpy()), (name, kind)
            assert equal(made.scales, te[f"{name}.{kind}.scales"].numpy()), (name, kind)


def test_the_rht_gives_transformer_engine_s_bytes(te: dict[str, torch.Tensor]) -> None:
    for name in names(te):
        if f"{name}.rht_t.y" in te:
            y_KT = quantizers.rht_transpose(te[f"{name}.x"].float().numpy())
            assert equal(y_KT, te[f"{name}.rht_t.y"].float().numpy()), name
            made = quantizers.nvfp4(y_KT)
            assert equal(made.codes, te[f"{name}.rht_t.codes"].numpy()), name
            assert equal(made.scales, te[f"{name}.rht_t.scales"].numpy()), name


def test_mxfp8_gives_torchao_s_bytes(shared: Path) -> None:
    golden = load_file(shared / "golden" / "mx_torchao.safetensors")
    for name in names(golden):
        made = quantizers.mxfp8(golden[f"{name}.x"].float().numpy())
        assert equal(made.codes, golden[f"{name}.mxfp8.rceil.codes"].numpy()), name
        assert equal(made.scales, golden[f"{name}.mxfp8.rceil.scales"].numpy()), name


def test_a_square_block_transposes_to_its_own_codes() -> None:
    x = np.random.default_rng(0).standard_normal((32, 48))
    forward = quantizers.nvfp4(x, block_rows=16)
    back = quantizers.nvfp4(x.T, block_rows=16)
    turned = forward.transpose()
    for mine, other in ((turned.codes, back.codes), (turned.scales, back.scales)):
        assert equal(mine, other)
    assert np.array_equal(turned.values, back.values)
