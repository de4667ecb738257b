"""Verdicts of the burn-in: how checks are run, timed and told of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

BUDGET_SECONDS = 240.0
"""No check starts later than this."""

Check = Callable[[torch.device], str]


class CheckError(Exception):
    """A check found something wrong; its text says what, and what to do."""


class NotCheckedError(Exception):
    """A check does not apply here; its text says why."""


@dataclass(frozen=True)
class Verdict:
    """What became of one check."""

    name: str
    status: Literal["ok", "FAILED", "skipped"]
    detail: str
    seconds: float = 0.0


def run(
    checks: Sequence[tuple[str, Check]],
    device: torch.device,
    *,
    budget: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    report: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Run checks one after the other. An exception is that check's failure, not the program's."""
    start = clock()
    verdicts = []
    for name, check in checks:
        began = clock()
        if began - start > budget:
            verdict = Verdict(name, "skipped", f"{budget:.0f} s were over before its turn")
        else:
            status, detail = _outcome(check, device)
            verdict = Verdict(name, status, detail, clock() - began)
        report(verdict)
        verdicts.append(verdict)
    return verdicts


def _outcome(check: Check, device: torch.device) -> tuple[Literal["ok", "FAILED", "skipped"], str]:
    try:
        return "ok", check(device)
    except NotCheckedError as reason:
        return "skipped", str(reason)
    except CheckError as failure:
        return "FAILED", str(failure)
    except Exception as error:  # a kernel that does not compile, a device that is lost
        return "FAILED", f"{type(error).__name__}: {error}".splitlines()[0]


def line(verdict: Verdict) -> str:
    """One line of the page."""
    return f"{verdict.status:8s} {verdict.name:32s} {verdict.seconds:6.1f} s  {verdict.detail}"


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """1 if any check failed, or none ran; else 0."""
    statuses = {verdict.status for verdict in verdicts}
    return int("FAILED" in statuses or "ok" not in statuses)


def summary(verdicts: Sequence[Verdict]) -> str:
    """The last line of the page."""
    counts = {s: sum(v.status == s for v in verdicts) for s in ("ok", "FAILED", "skipped")}
    seconds = sum(verdict.seconds for verdict in verdicts)
    word = "this card is not fit" if exit_code(verdicts) else "this card is fit"
    return f"{word}: {', '.join(f'{n} {s}' for s, n in counts.items())}, in {seconds:.0f} s"
