"""The random Hadamard transform: orthogonal, in one order of sums, rounded to BF16."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quant.hadamard import SIGNS, rht_transpose

pytestmark = pytest.mark.usefixtures("implementation")


def wide(tokens: int, features: int) -> torch.Tensor:
    """BF16 values whose exponents spread so far that the order of a sum shows."""
    generator = torch.Generator().manual_seed(1)
    exponent = torch.randint(-15, 15, (tokens, features), generator=generator)
    x = torch.randn(tokens, features, generator=generator) * torch.exp2(exponent.float())
    return x.bfloat16()


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's matrix by its recursion."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def test_every_golden_transform_is_equal_to_the_byte(shared: Path):
    golden = load_file(shared / "golden" / "nvfp4_te_reference.safetensors")
    names = [name.removesuffix(".rht_t.y") for name in golden if name.endswith(".rht_t.y")]
    assert names
    for name in names:
        y_KT = rht_transpose(golden[f"{name}.x"])
        assert torch.equal(y_KT, golden[f"{name}.rht_t.y"]), name


def test_the_sums_are_taken_in_butterfly_order_in_fp32():
    x_TK = wide(48, 20)
    tiles = x_TK.float().numpy().reshape(3, 16, 20) * np.array(SIGNS, np.float32)[:, None]
    for stride in (1, 2, 4, 8):
        before = tiles.copy()
        for i in range(16):
            low, high = before[:, i & ~stride], before[:, i | stride]
            tiles[:, i] = low - high if i & stride else low + high
    expected = torch.from_numpy(tiles.reshape(48, 20) * np.float32(0.25)).bfloat16().t()
    assert torch.equal(rht_transpose(x_TK), expected)


@pytest.mark.parametrize("size", [16, 32])
def test_it_is_the_product_with_signs_and_hadamard_matrix(size):
    x_TK = torch.randn(3 * size, 10, generator=torch.Generator().manual_seed(0))
    signs = torch.tensor(SIGNS * (size // 16), dtype=torch.float64)
    matrix = torch.diag(signs) @ hadamard(size) / math.sqrt(size)
    expected = (x_TK.double().t().reshape(10, 3, size) @ matrix).reshape(10, -1)
    assert torch.allclose(rht_transpose(x_TK, size=size).double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("tokens", [1, 15, 16, 40, 100])
def test_the_product_over_tokens_survives_even_where_tiles_are_padded(size, tokens):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (tokens, 8), generator=generator).float() for _ in range(2))
    a_KT, b_KT = rht_transpose(a, size=size), rht_transpose(b, size=size)
    assert a_KT.shape == (8, -(-tokens // size) * size)
    product = a_KT.double() @ b_KT.double().t()
    bound = 2**-7 * a.norm() * b.norm()
    assert torch.allclose(product, a.double().t() @ b.double(), atol=bound.item(), rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_transposed_or_expanded_input_gives_what_its_copy_gives(dtype):
    base = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    for x in (base.t(), base[::2], base[:1].expand(32, 40)):
        assert torch.equal(rht_transpose(x), rht_transpose(x.contiguous()))


@pytest.mark.parametrize("shape", [(70, 3), (129, 65), (64, 64), (16, 200)])
def test_a_column_does_not_depend_on_its_neighbours(shape):
    x = wide(*shape)
    whole = rht_transpose(x)
    for k in (0, shape[1] - 1):
        assert torch.equal(rht_transpose(x[:, k : k + 1])[0], whole[k])


def test_other_signs_give_the_transform_of_the_sign_flipped_tokens():
    x_TK = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    flipped = [-s for s in SIGNS]
    assert torch.equal(rht_transpose(x_TK, flipped), rht_transpose(-x_TK))


def test_wrong_sizes_signs_and_shapes_are_refused():
    x_TK = torch.zeros(16, 4)
    with pytest.raises(ValueError, match="one of"):
        rht_transpose(x_TK, size=8)
    with pytest.raises(ValueError, match="takes 16 signs"):
        rht_transpose(x_TK, [1, -1])
    with pytest.raises(ValueError, match="takes 16 signs"):
        rht_transpose(x_TK, [2] * 16)
    with pytest.raises(ValueError, match="tokens, features"):
        rht_transpose(torch.zeros(2, 16, 4))
