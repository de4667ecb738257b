"""Rounding to E2M1 and E4M3, and the random bits of stochastic rounding.

The random byte of an element is a pure function of a `RoundingKey` and the element's index in the
tensor that is quantized. Nothing is drawn from a generator, so activation recompute, resume,
another world size and chunking all see the same bits.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC11). One call gives 16 bytes, which serve 16 neighbouring elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from quant.formats import E2M1_VALUES, ELEMENT_MAX

GROUP = 16
"""Elements that one Philox call serves."""

MAX_ELEMENTS = GROUP << 32
"""Elements that one key can serve: the call counter has 32 bits."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Role(IntEnum):
    """Which of a linear's three tensors is rounded."""

    ACTIVATION = 0
    WEIGHT = 1
    GRADIENT = 2


class Copy(IntEnum):
    """Which of a tensor's two quantized copies is rounded: they must not share random bits."""

    ROW = 0
    COLUMN = 1


@dataclass(frozen=True)
class RoundingKey:
    """Names one tensor of one training run; the random bits depend on nothing else.

    Attributes:
        seed: the run's seed, 64 bits.
        step: optimizer step, 32 bits.
        microbatch: index of the micro-batch within the global batch, 32 bits.
        layer: index of the linear within the model, 24 bits.
        role: a `Role`, 4 bits.
        copy: a `Copy`, 4 bits.

    Raises:
        ValueError: a field is negative or does not fit its bits.
    """

    seed: int
    step: int
    microbatch: int
    layer: int
    role: int
    copy: int

    def __post_init__(self) -> None:
        widths = {"seed": 64, "step": 32, "microbatch": 32, "layer": 24, "role": 4, "copy": 4}
        for name, bits in widths.items():
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"RoundingKey.{name} = {value} must lie in [0, 2^{bits})")

    @property
    def words(self) -> tuple[int, int]:
        """The two 32-bit key words of Philox."""
        return self.seed & _MASK, self.seed >> 32

    @property
    def counter(self) -> tuple[int, int, int]:
        """The counter words after the first, which holds the group of 16 elements."""
        return self.microbatch, self.step, self.layer << 8 | self.role << 4 | self.copy


def _multiply(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product of 32-bit words; split, as int64 is signed."""
    upper = a * (m >> 16)
    lower = a * (m & 0xFFFF)
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> Tensor:
    """Philox4x32-10.

    Args:
        counter: four int64 tensors of one shape (or broadcastable), each word in [0, 2^32).
        key: two words in [0, 2^32).

    Returns:
        int64 [..., 4], each word in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)


def check_elements(start: int, count: int) -> None:
    """Raise ValueError unless elements [start, start + count) exist under one key."""
    if start < 0 or start + count > MAX_ELEMENTS:
        raise ValueError(
            f"elements [{start}, {start + count}) reach outside [0, 2^36), the range of one "
            "rounding key; split the tensor and give each part a key of its own"
        )


def random_bytes(
    key: RoundingKey, start: int, count: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The random bytes of elements [start, start + count).

    Element e of a group of 16 takes byte e % 4 (little end first) of word e // 4. This map is the
    project's own: hardware instructions that round stochastically consume their bytes in another
    order, which a kernel must undo.

    Returns:
        uint8 [count].

    Raises:
        ValueError: the range leaves [0, 2^36).
    """
    check_elements(start, count)
    if count == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    first, last = start // GROUP, (start + count - 1) // GROUP
    group = torch.arange(first, last + 1, dtype=torch.int64, device=device)
    microbatch, step, rest = (torch.full_like(group[:1], word) for word in key.counter)
    words = philox((group, microbatch, step, rest), key.words)
    shifts = torch.tensor([0, 8, 16, 24], device=device)
    bytes_ = ((words[..., None] >> shifts) & 0xFF).to(torch.uint8).flatten()
    skipped = start - first * GROUP
    return bytes_[skipped : skipped + count]


# A value at or below the boundary keeps the lower code. Three of the midpoints belong to the upper
# (even) code, so their boundary is the float just under the midpoint.
_E2M1_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_TIES_UP = (False, True, False, True, False, True, False)


def _signed(code: Tensor, y: Tensor) -> Tensor:
    """Code with its sign bit. Both zeros give code 0, as in Transformer Engine's reference."""
    return torch.where(y < 0, code + 8, code).to(torch.uint8)


def round_e2m1(y: Tensor) -> Tensor:
    """E2M1 codes of FP32 `y`: nearest, ties to the even code, saturating at 6; NaN gives +6.

    Returns:
        uint8 in [0, 16), the shape of y.
    """
    middle = torch.tensor(_E2M1_BOUNDARIES, device=y.device)
    below = torch.nextafter(middle, torch.zeros_like(middle))
    ties_up = torch.tensor(_TIES_UP, device=y.device)
    boundaries = torch.where(ties_up, below, middle)
    code = torch.bucketize(y.abs().contiguous(), boundaries, out_int32=True)
    return _signed(code, y)


def round_e2m1_stochastic(y: Tensor, random: Tensor) -> Tensor:
    """E2M1 codes of FP32 `y`, rounded up with probability floor(256 * frac) / 256.

    `frac` is the position between the two neighbouring codes. With f = floor(256 * frac) and the
    random byte r the magnitude is rounded up when f + r >= 256. Magnitudes are clamped to 6 first;
    NaN gives +6.

    Args:
        y: FP32.
        random: uint8, the shape of y.

    Returns:
        uint8 in [0, 16), the shape of y.
    """
    a = y.abs().clamp(max=6.0).nan_to_num(nan=6.0)
    # 256 * (code + frac) in exact arithmetic: the step is 0.5 below 2, 1 below 4, 2 below 6.
    # Floor before the offset is added: the sum would otherwise round.
    position = torch.where(
        a < 2,
        (a * 512).int(),
        torch.where(a < 4, (a * 256).int() + 512, (a * 128).int() + 1024),
    )
    code = (position + random) >> 8
    return _signed(code, y)


def round_e4m3(y: Tensor) -> Tensor:
    """E4M3 of FP32 `y`: nearest, ties to even, saturating at 448; NaN stays NaN.

    The clamp comes before the cast because casts differ in what they do above 448.

    Returns:
        float8_e4m3fn, the shape of y.
    """
    largest = ELEMENT_MAX["e4m3"]
    return y.clamp(-largest, largest).to(torch.float8_e4m3fn)


def e2m1_values(codes: Tensor) -> Tensor:
    """FP32 values of E2M1 codes (uint8 in [0, 16))."""
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=codes.device)
    return table[codes.int()]
