"""What the burn-in compares, apart from any device: bytes, orders of bytes, sums, peaks, curves.

Legend: G groups of 4 elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.burnin.verdicts import CheckError, NotCheckedError


def same_bytes(name: str, made: Tensor, wanted: Tensor) -> int:
    """Number of bytes compared.

    Raises:
        CheckError: any differs; says how many and where the first is.
    """
    a, b = (t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (made, wanted))
    if a.shape != b.shape:
        raise CheckError(f"{name}: {tuple(made.shape)} in place of {tuple(wanted.shape)}")
    wrong = (a != b).nonzero().flatten()
    if len(wrong):
        at = int(wrong[0])
        raise CheckError(
            f"{name}: {len(wrong)} of {len(a)} bytes differ, the first at {at}: "
            f"{int(a[at]):#04x} in place of {int(b[at]):#04x}"
        )
    return len(a)


def byte_orders(codes_G4: Tensor, y_G4: Tensor, random_G4: Tensor) -> list[tuple[int, ...]]:
    """Which of a group's four random bytes each element may have used: all orders that explain it.

    Args:
        codes_G4: uint8 codes that the hardware gave.
        y_G4: FP32, scaled values.
        random_G4: uint8, our bytes.

    Returns:
        orders p, element e having used byte p[e]; (0, 1, 2, 3) where all is as we want it.
    """
    from quant.rounding import round_e2m1_stochastic

    return [
        order
        for order in itertools.permutations(range(4))
        if torch.equal(round_e2m1_stochastic(y_G4, random_G4[:, order]), codes_G4)
    ]


def mended_selector(selector: int, order: Sequence[int]) -> int:
    """What `e2m1.rs_byte_order` must return where elements used bytes in `order` under `selector`.

    Nibble j of a selector is the byte of ours that becomes byte j of the instruction's operand.
    """
    ours = [selector >> 4 * j & 15 for j in range(4)]
    taken = [ours.index(order[e]) for e in range(4)]  # the operand's byte that element e takes
    return sum(e << 4 * taken[e] for e in range(4))


@dataclass(frozen=True)
class Peaks:
    """Nominal bytes and dense BF16 operations a second of a card (NVIDIA's data sheets)."""

    bytes: float
    bf16: float


CARDS = {
    "B200": Peaks(8.0e12, 2.25e15),
    "B300": Peaks(8.0e12, 2.25e15),
    "H200": Peaks(4.8e12, 0.989e15),
    "H100": Peaks(3.35e12, 0.989e15),
}
COPY_SHARE, BF16_SHARE = 0.8, 0.6


def judge_peaks(card: str, copy: float, bf16: float) -> str:
    """Whether measured bytes and operations a second are what such a card gives.

    Raises:
        CheckError: less than 80% of its bandwidth or 60% of its BF16 peak.
    """
    measured = f"copy {copy / 1e12:.2f} TB/s, BF16 GEMM {bf16 / 1e12:.0f} TFLOP/s"
    nominal = next((peaks for name, peaks in CARDS.items() if name in card), None)
    if nominal is None:
        return f"{measured}; no figures to compare {card} with"
    shares = copy / nominal.bytes, bf16 / nominal.bf16
    text = f"{measured}: {shares[0]:.0%} and {shares[1]:.0%} of nominal"
    if shares[0] < COPY_SHARE or shares[1] < BF16_SHARE:
        raise CheckError(f"{text}; look for another process, a power cap, or a throttled card")
    return text


def judge_sums(name: str, made: Tensor, wanted: Tensor, bound: Tensor) -> float:
    """Largest share of the bound that a difference takes.

    Raises:
        CheckError: it is over 1, or something is not finite.
    """
    difference = (made.detach().cpu().double() - wanted.double()).abs()
    share = (difference / bound.double().clamp(min=1e-300)).max().item() if made.numel() else 0.0
    if not share <= 1:
        raise CheckError(f"{name}: off by {share:.3g} times what the order of addition allows")
    return share


TAIL = 50
TOLERANCE = 0.02


def judge_curves(card: Sequence[float], cpu: Sequence[float]) -> str:
    """Whether two loss curves are the same training.

    The first loss may differ by the order of sums, the mean of the last 50 by 2%.

    Raises:
        CheckError: it is not.
        NotCheckedError: too few steps to tell.
    """
    steps = min(len(card), len(cpu))
    if not all(map(math.isfinite, card)):
        raise CheckError("the loss on the card is not finite")
    if steps < TAIL:
        raise NotCheckedError(
            f"in the time given the runs took {len(card)} and {len(cpu)} steps only"
        )
    first = abs(card[0] / cpu[0] - 1)
    tail = min(TAIL, steps)
    mean = [sum(losses[steps - tail : steps]) / tail for losses in (card, cpu)]
    apart = abs(mean[0] / mean[1] - 1)
    text = f"{steps} steps; first loss {first:.1e} apart, mean of the last {tail} {apart:.2%} apart"
    if first > 1e-3 or apart > TOLERANCE:
        raise CheckError(f"{text} (allowed: 1e-3 and {TOLERANCE:.0%})")
    return text
