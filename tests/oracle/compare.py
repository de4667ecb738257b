"""Holds a witnessed step to the oracle, and lists what disagrees.

The oracle **replays** the step: each linear checks that it is given the bits that the witness saw,
computes its GEMMs, checks that the witnessed result lies within the bound of FP32 summation, and
goes on with the witnessed result. So no difference is amplified by later layers, nor excused by
earlier ones: all that lies between the linears must be equal to the bit, and every linear, sum and
update must be right within a rounding bound of its own.

u is FP32's unit roundoff, 2^-24, throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tests.oracle.linear import UNIT, Product, Rules
from tests.oracle.step import (
    Course,
    Passes,
    Place,
    Step,
    adamw,
    clip,
    count_valid,
    global_norm,
    run_passes,
)
from tests.oracle.witness import Witness


@dataclass(frozen=True)
class Mismatch:
    """``wrong`` of ``size`` values of ``what`` (x, y, dy, dx, dw, gradient, ...) disagree."""

    what: str
    where: str
    wrong: int
    size: int


class Judge:
    """Collects what disagrees."""

    def __init__(self) -> None:
        self.mismatches: list[Mismatch] = []

    def judge(self, what: str, where: str, right: np.ndarray) -> None:
        if not right.all():
            wrong = int(np.count_nonzero(~right))
            self.mismatches.append(Mismatch(what, where, wrong, right.size))


class Replay(Course, Judge):
    """Follows a witness, and notes where it leaves the path that the oracle allows.

    ``slack``: for x, dy or gradient (of what no linear holds), how far of the tensor's largest
    magnitude the witness may lie from the oracle. What is not named must be equal to the bit.
    """

    def __init__(self, witness: Witness, slack: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.witness, self.slack = witness, slack or {}

    def judge_alike(self, what: str, where: str, seen: np.ndarray, value: np.ndarray) -> None:
        if what in self.slack:
            tolerance = self.slack[what] * float(np.abs(value).max())
            self.judge(what, where, _near(seen, value, tolerance))
        else:
            self.judge(what, where, same_bits(seen, value))

    def meets(self, place: Place, what: str, value_TC: np.ndarray) -> np.ndarray:
        seen = self.witness.calls[place][what]
        self.judge_alike(what, f"{place}", seen, value_TC)
        return seen

    def takes(self, place: Place, what: str, product_TC: Product) -> np.ndarray:
        seen = self.witness.calls[place][what]
        self.judge(what, f"{place}", product_TC.allows_bf16(seen))
        return seen


def compare(
    step: Step,
    witness: Witness,
    rules: Rules | None = None,
    slack: Mapping[str, float] | None = None,
) -> tuple[list[Mismatch], Passes]:
    """All disagreements, and the oracle's own figures of the replayed passes."""
    mismatches, (passes,) = compare_ranks(step, [witness], rules, slack)
    return mismatches, passes


def compare_ranks(
    step: Step,
    witnesses: Sequence[Witness],
    rules: Rules | None = None,
    slack: Mapping[str, float] | None = None,
) -> tuple[list[Mismatch], list[Passes]]:
    """The same for the ranks that took one step together: ``step`` is that of the global batch, and
    each witness saw a share of its micro-batches, or none."""
    found, passes, num_valid = Judge(), [], count_valid(step.micro_batches)
    by_index = {micro_batch.index: micro_batch for micro_batch in step.micro_batches}
    taken = sorted(micro_batch.index for w in witnesses for micro_batch in w.micro_batches)
    found.judge("micro-batches", "all", np.array(taken == sorted(by_index)))
    for witness in witnesses:
        micro_batches = [by_index[micro_batch.index] for micro_batch in witness.micro_batches]
        share = replace(step, micro_batches=micro_batches, num_valid=num_valid)
        replay = Replay(witness, slack)
        passes.append(run_passes(share, rules, replay))
        assert set(passes[-1].records) == set(witness.calls)
        _judge_gradients(replay, share, passes[-1])
        found.mismatches += replay.mismatches
    _judge_reduced(found, step, witnesses)
    for witness in witnesses:
        _judge_norm_and_loss(found, step, witness, passes)
        _judge_update(found, step, witness)
        _judge_replica(found, witnesses[0], witness)
    return found.mismatches, passes


def _judge_gradients(replay: Replay, step: Step, passes: Passes) -> None:
    """Weight gradients of linears within the GEMM's bound; all other parameters' alike."""
    before = {name: np.zeros_like(value) for name, value in step.weights.items()}
    for position, micro_batch in enumerate(step.micro_batches):
        seen = replay.witness.gradients[position]
        for name in step.weights:
            where = f"{name}, micro-batch {micro_batch.index}"
            record = passes.records.get((name.removesuffix(".weight"), micro_batch.index))
            if record is not None:
                right = record.products["dw"].allows_sum(seen[name], before[name])
                replay.judge("dw", where, right)
            else:
                expected = passes.gradients[position][name]
                replay.judge_alike("gradient", where, seen[name], expected)
        before = seen


def _judge_reduced(found: Judge, step: Step, witnesses: Sequence[Witness]) -> None:
    """The sum over n ranks of what each was seen to hold errs, in any order, by at most g(n - 1)
    of the sum of magnitudes: by nothing on one rank."""
    for name, weight in step.weights.items():
        held = [w.gradients[-1][name] for w in witnesses if w.gradients] or [np.zeros_like(weight)]
        total = np.sum(held, axis=0, dtype=np.float64)
        count = (len(witnesses) - 1) * UNIT
        tolerance = count / (1 - count) * np.sum(np.abs(held), axis=0, dtype=np.float64)
        for witness in witnesses:
            found.judge("reduced", name, _near(witness.reduced[name], total, tolerance))


def _judge_replica(found: Judge, first: Witness, witness: Witness) -> None:
    """Ranks hold the same bits before and after the step, and report the same."""
    found.judge("replica", "result", np.array(witness.result == first.result))
    for what in ("weights_before", "reduced", "clipped", "weights_after"):
        for name, value in getattr(first, what).items():
            found.judge("replica", f"{what} {name}", same_bits(getattr(witness, what)[name], value))


def _judge_norm_and_loss(
    found: Judge, step: Step, witness: Witness, passes: Sequence[Passes]
) -> None:
    """The square root of n squares added in FP32 in any order errs by at most g(n + 3) of itself,
    and a sum of m losses divided by a count by g(m + 1) of the losses' sum."""
    result = witness.result
    assert result is not None
    norm = global_norm(witness.reduced)
    count = sum(value.size for value in step.weights.values()) + 3
    found.judge("norm", "all", _near(result.grad_norm, norm, count * UNIT * norm))
    losses, num_valid = [loss for p in passes for loss in p.losses], passes[0].num_valid
    loss = sum(losses) / num_valid
    found.judge("loss", "all", _near(result.loss, loss, (len(losses) + 2) * UNIT * loss))
    found.judge("num_valid", "all", np.array(result.num_valid == num_valid))
    factor_error = count * UNIT + 1e-6 / norm + 4 * UNIT  # PyTorch divides by norm + 1e-6
    expected = clip(witness.reduced, norm, step.clip_norm)
    for name, value in expected.items():
        right = _near(witness.clipped[name], value, factor_error * np.abs(value))
        found.judge("clipped", name, right)


def _judge_update(found: Judge, step: Step, witness: Witness) -> None:
    """AdamW on the witnessed gradients. Beside the last rounding of the weight (u |w|, and twice
    that for its decay), about a dozen FP32 operations lie on an update's path; 16 u of its size,
    with the momentum's two terms taken by magnitude, covers them."""
    expected, _ = adamw(step, witness.clipped)
    size = _largest_update(step, witness)
    for name, value in expected.items():
        tolerance = 4 * UNIT * np.abs(step.weights[name]) + 16 * UNIT * size[name]
        found.judge("weight", name, _near(witness.weights_after[name], value, tolerance))


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
