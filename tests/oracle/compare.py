"""Holds a witnessed step to the oracle, and lists what disagrees.

The oracle **replays** the step: each linear checks that it is given the bits that the witness saw,
computes its GEMMs, checks that the witnessed result lies within the bound of FP32 summation, and
goes on with the witnessed result. So no difference is amplified by later layers, nor excused by
earlier ones: all that lies between the linears must be equal to the bit, and every linear, sum and
update must be right within a rounding bound of its own.

u is FP32's unit roundoff, 2^-24, throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tests.oracle.linear import UNIT, Product, Rules
from tests.oracle.step import Course, Outcome, Place, Step, adamw, clip, global_norm, run_step
from tests.oracle.witness import Witness


@dataclass(frozen=True)
class Mismatch:
    """``wrong`` of ``size`` values of ``what`` (x, y, dy, dx, dw, gradient, ...) disagree."""

    what: str
    where: str
    wrong: int
    size: int


class Replay(Course):
    """Follows a witness, and notes where it leaves the path that the oracle allows."""

    def __init__(self, witness: Witness) -> None:
        self.witness = witness
        self.mismatches: list[Mismatch] = []

    def judge(self, what: str, where: str, right: np.ndarray) -> None:
        if not right.all():
            wrong = int(np.count_nonzero(~right))
            self.mismatches.append(Mismatch(what, where, wrong, right.size))

    def meets(self, place: Place, what: str, value_TC: np.ndarray) -> None:
        self.judge(what, f"{place}", same_bits(value_TC, self.witness.calls[place][what]))

    def takes(self, place: Place, what: str, product_TC: Product) -> np.ndarray:
        seen = self.witness.calls[place][what]
        self.judge(what, f"{place}", product_TC.allows_bf16(seen))
        return seen


def compare(
    step: Step, witness: Witness, rules: Rules | None = None
) -> tuple[list[Mismatch], Outcome]:
    """All disagreements, and the oracle's own figures of the replayed step."""
    replay = Replay(witness)
    outcome = run_step(step, rules, replay)
    assert set(outcome.records) == set(witness.calls)
    _judge_gradients(replay, step, outcome)
    _judge_norm_and_loss(replay, step, outcome)
    _judge_update(replay, step)
    return replay.mismatches, outcome


def _judge_gradients(replay: Replay, step: Step, outcome: Outcome) -> None:
    """Weight gradients of linears within the GEMM's bound; all other parameters' to the bit."""
    before = {name: np.zeros_like(value) for name, value in step.weights.items()}
    for position, micro_batch in enumerate(step.micro_batches):
        seen = replay.witness.gradients[position]
        for name in step.weights:
            where = f"{name}, micro-batch {micro_batch.index}"
            record = outcome.records.get((name.removesuffix(".weight"), micro_batch.index))
            if record is not None:
                right = record.products["dw"].allows_sum(seen[name], before[name])
                replay.judge("dw", where, right)
            else:
                right = same_bits(seen[name], outcome.gradients[position][name])
                replay.judge("gradient", where, right)
        before = seen


def _judge_norm_and_loss(replay: Replay, step: Step, outcome: Outcome) -> None:
    """The square root of n squares added in FP32 in any order errs by at most g(n + 3) of itself,
    and a sum of m losses divided by a count by g(m + 1) of the losses' sum."""
    result = replay.witness.result
    assert result is not None
    norm = global_norm(replay.witness.gradients[-1])
    count = sum(value.size for value in step.weights.values()) + 3
    replay.judge("norm", "all", _near(result.grad_norm, norm, count * UNIT * norm))
    loss = sum(outcome.losses) / outcome.num_valid
    tolerance = (len(outcome.losses) + 2) * UNIT * loss
    replay.judge("loss", "all", _near(result.loss, loss, tolerance))
    replay.judge("num_valid", "all", np.array(result.num_valid == outcome.num_valid))
    factor_error = count * UNIT + 1e-6 / norm + 4 * UNIT  # PyTorch divides by norm + 1e-6
    expected = clip(replay.witness.gradients[-1], norm, step.clip_norm)
    for name, value in expected.items():
        right = _near(replay.witness.clipped[name], value, factor_error * np.abs(value))
        replay.judge("clipped", name, right)


def _judge_update(replay: Replay, step: Step) -> None:
    """AdamW on the witnessed gradients. Beside the last rounding of the weight (u |w|, and twice
    that for its decay), about a dozen FP32 operations lie on an update's path; 16 u of its size,
    with the momentum's two terms taken by magnitude, covers them."""
    witness = replay.witness
    expected, _ = adamw(step, witness.clipped)
    size = _largest_update(step, witness)
    for name, value in expected.items():
        tolerance = 4 * UNIT * np.abs(step.weights[name]) + 16 * UNIT * size[name]
        replay.judge("weight", name, _near(witness.weights_after[name], value, tolerance))


def _largest_update(step: Step, witness: Witness) -> dict[str, np.ndarray]:
    """lr |m| / (sqrt(v) + eps), |m| without cancellation."""
    still = replace(step, weights={n: np.zeros_like(w) for n, w in step.weights.items()})
    gradients = {name: np.abs(g) for name, g in witness.clipped.items()}
    if step.moments is not None:
        first = {name: np.abs(m) for name, m in step.moments.first.items()}
        still = replace(still, moments=replace(step.moments, first=first))
    return {name: np.abs(update) for name, update in adamw(still, gradients)[0].items()}


def same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two FP32 arrays hold equal bits; 0 and -0 differ."""
    return np.ascontiguousarray(a).view(np.uint32) == np.ascontiguousarray(b).view(np.uint32)


def _near(value: np.ndarray | float, expected: np.ndarray | float, tolerance: object) -> np.ndarray:
    difference = np.abs(np.asarray(value, np.float64) - np.asarray(expected, np.float64))
    return np.asarray(difference <= tolerance)


def shown(mismatches: list[Mismatch]) -> str:
    """A line each, for an assertion's message."""
    return "\n".join(_lines(mismatches)) or "nothing disagrees"


def _lines(mismatches: list[Mismatch]) -> Iterator[str]:
    for m in mismatches:
        yield f"{m.what} of {m.where}: {m.wrong} of {m.size} values disagree"
