"""Block quantizers: NVFP4 in blocks of 1x16 and 16x16, MXFP8 in 1x32, and the RHT.

Every operation is one FP32 operation in the documented order, which decides the bytes.
Legend: R rows, C columns (blocks run along them), T tokens, K features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.oracle import numbers
from tests.oracle.philox import Key

SIGNS = np.array([+1, +1, +1, -1, +1, -1, -1, -1, -1, -1, -1, +1, -1, +1, -1, -1], np.float32)
FLT_MAX = np.finfo(np.float32).max
LARGEST_ENCODE = np.float32(2.0**126)
"""Keeps 1 / S_enc out of FP32's subnormals."""


@dataclass(frozen=True)
class Operand:
    """A matrix as a GEMM reads it.

    ``values`` FP64 [R, C]: what multiplies, exact, without the tensor scale ``global_scale``.
    ``codes`` and ``scales``: the bytes (codes of 4 bits packed, even element low); None in BF16.
    """

    values: np.ndarray
    codes: np.ndarray | None = None
    scales: np.ndarray | None = None
    global_scale: np.float32 | None = None

    def transpose(self) -> Operand:
        """For 16x16 blocks: the same codes and scales, transposed."""
        assert self.codes is not None
        assert self.scales is not None
        codes = pack(unpack(self.codes).T)
        scales = np.repeat(self.scales[::16].T, 16, axis=0)[: self.values.shape[1]]
        return Operand(self.values.T, codes, scales, self.global_scale)


def pack(code: np.ndarray) -> np.ndarray:
    return (code[:, 0::2] | code[:, 1::2] << 4).astype(np.uint8)


def unpack(byte: np.ndarray) -> np.ndarray:
    return np.stack([byte & 15, byte >> 4], axis=-1).reshape(len(byte), -1)


def bf16(x_RC: np.ndarray) -> Operand:
    return Operand(numbers.bf16(x_RC))


def nvfp4(x_RC: np.ndarray, block_rows: int = 1, key: Key | None = None) -> Operand:
    """Blocks of ``block_rows`` x 16; stochastic rounding where there is a ``key``.

    Rows and columns that do not fill a last block leave it smaller.
    """
    x_RC = np.asarray(x_RC, dtype=np.float32)
    amax = np.abs(x_RC).max()
    encode = np.float32(1.0)
    if amax > 0:
        with np.errstate(over="ignore"):
            encode = np.minimum(np.float32(2688.0) / amax, LARGEST_ENCODE)
    decode = np.float32(1.0) / encode
    multiplier = encode * np.float32(1 / 6)

    block_amax = _amax_of_blocks(np.abs(x_RC), block_rows, 16)
    with np.errstate(over="ignore", divide="ignore"):
        scale = numbers.e4m3(np.minimum(block_amax * multiplier, FLT_MAX)).astype(np.float32)
        block_encode = np.minimum(np.float32(1.0) / (scale * decode), FLT_MAX)
        y = x_RC * _spread(block_encode, x_RC.shape, block_rows, 16)
    assert y.dtype == np.float32
    y = np.clip(y, np.float32(-6.0), np.float32(6.0)).astype(np.float64)
    if key is None:
        code = numbers.e2m1_nearest(np.abs(y))
    else:
        code = numbers.e2m1_stochastic(np.abs(y), key.bytes(*x_RC.shape))
    scale_RC = _spread(scale.astype(np.float64), x_RC.shape, block_rows, 16)
    values = np.where(y < 0, -1.0, 1.0) * numbers.E2M1[code] * scale_RC
    scales = np.repeat(numbers.e4m3_byte(scale), block_rows, axis=0)[: len(x_RC)]
    return Operand(values, pack(code + 8 * (y < 0)), scales, decode)


def mxfp8(x_RC: np.ndarray) -> Operand:
    """Blocks of 1x32 of E4M3 under a power of two, rounded up so that nothing clips."""
    x_RC = np.asarray(x_RC, dtype=np.float64)
    exponent = numbers.e8m0_round_up(_amax_of_blocks(np.abs(x_RC), 1, 32))
    scale_RC = _spread(np.ldexp(1.0, exponent), x_RC.shape, 1, 32)
    element = numbers.e4m3(x_RC / scale_RC)
    scales = (exponent + 127).astype(np.uint8)
    return Operand(element * scale_RC, numbers.e4m3_byte(element), scales)


def _amax_of_blocks(magnitude_RC: np.ndarray, height: int, width: int) -> np.ndarray:
    rows, columns = magnitude_RC.shape
    of_rows = np.maximum.reduceat(magnitude_RC, range(0, rows, height), axis=0)
    return np.maximum.reduceat(of_rows, range(0, columns, width), axis=1)


def _spread(per_block: np.ndarray, shape: tuple[int, ...], height: int, width: int) -> np.ndarray:
    """A value per block, repeated on each of its elements."""
    wide = np.repeat(np.repeat(per_block, height, axis=0), width, axis=1)
    return wide[: shape[0], : shape[1]]


def hadamard16() -> np.ndarray:
    """Sylvester's matrix: +1 where the indices share an even number of bits."""
    return np.array(
        [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(16)] for i in range(16)],
        dtype=np.float32,
    )


def padded_transpose(x_TK: np.ndarray, multiple: int) -> np.ndarray:
    """[K, T'], zero tokens added up to a multiple."""
    padding = -len(x_TK) % multiple
    return np.pad(x_TK, ((0, padding), (0, 0))).T


def rht_transpose(x_TK: np.ndarray) -> np.ndarray:
    """diag(signs) @ H16 / 4 on tiles of 16 tokens, transposed, rounded to BF16: FP32 [K, T'].

    The 16 products of each result are added in pairs of neighbours, then pairs of pairs, in FP32.
    """
    tile = padded_transpose(np.asarray(x_TK, np.float32), 16).reshape(x_TK.shape[1], -1, 16)
    matrix = SIGNS[:, None] * hadamard16()
    term = tile[..., :, None] * matrix  # [K, tile, token i, result j]
    while term.shape[2] > 1:
        term = term[:, :, 0::2] + term[:, :, 1::2]
    result = term[:, :, 0] * np.float32(0.25)
    assert result.dtype == np.float32
    return numbers.bf16(result).astype(np.float32).reshape(x_TK.shape[1], -1)
