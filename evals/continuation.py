"""Which of four spans continues the text? A multiple-choice task from held-out documents.

A question shows the text before a cut of a document and four spans of equal length in characters:
the true continuation, and three from elsewhere in the same document. All begin at the same kind of
border (a line's start, or a sentence's start where a document has few lines), so that subject,
style and form give nothing away; what is left is whether the model follows the text. A choice is
judged by what the context adds to its likelihood (see `evals.harness.headline`). Chance is
0.25, and a model that answers always the same gets exactly about that: the answers are spread
evenly over the four places.

A source whose documents come from templates marks the held-out ones of templates that were never
trained on as `reserved`; where a source has such documents, only they are asked about.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NUM_CHOICES = 4
CHANCE = 1 / NUM_CHOICES
MIN_BORDERS = 8  # lines below which a document is cut at sentences instead
ATTEMPTS = 20  # cuts tried in a document before it counts as exhausted

_LINE_START = re.compile(r"(?<=\n)(?=[^\n])")
_SENTENCE_START = re.compile(r"(?<=[.!?] )(?=\S)")


@dataclass(frozen=True)
class Question:
    """One question; `choices[answer]` is what follows `context` in document `document`."""

    domain: str
    document: int  # index among the domain's held-out documents
    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Lengths:
    """Sizes in characters."""

    context: int = 300  # shown before the cut, at most
    min_context: int = 120
    span: int = 90


def make_questions(
    documents: Mapping[str, Sequence[Mapping[str, Any]]],
    num_questions: int,
    seed: int,
    lengths: Lengths = Lengths(),
) -> tuple[list[Question], dict[str, int]]:
    """Cut questions, evenly over domains and, within a domain, over its documents.

    A pure function of its arguments: a domain's questions depend on its name, not on the others.

    Args:
        documents: held-out documents by domain, each with `text` and `reserved`.
        num_questions: the total; a domain with too little text gives fewer than its share.

    Returns:
        The questions, and for each domain how many of its documents were too short to ask about.
    """
    questions: list[Question] = []
    too_short: dict[str, int] = {}
    for position, (domain, held_out) in enumerate(documents.items()):
        share = num_questions // len(documents) + (position < num_questions % len(documents))
        texts = _usable(held_out)
        cutters = [
            _Cutter(index, text, lengths, random.Random(f"{seed}/{domain}/{index}"))
            for index, text in texts
        ]
        able = [cutter for cutter in cutters if cutter.able]
        too_short[domain] = len(cutters) - len(able)
        random.Random(f"{seed}/{domain}").shuffle(able)
        questions += _ask(domain, able, share)
    return questions, too_short


def _usable(documents: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Indices and texts: the reserved documents of a source that has any, else all."""
    only_reserved = any(document["reserved"] for document in documents)
    return [
        (index, document["text"])
        for index, document in enumerate(documents)
        if document["reserved"] or not only_reserved
    ]


def _ask(domain: str, cutters: list[_Cutter], share: int) -> list[Question]:
    """Take one question of each document in turn until the share is full or all are exhausted."""
    questions: list[Question] = []
    while cutters and len(questions) < share:
        going_on = []
        for cutter in cutters:
            if len(questions) == share:
                break
            spans = cutter.next()
            if spans is None:
                continue
            context, true, *others = spans
            answer = len(questions) % NUM_CHOICES
            choices = (*others[:answer], true, *others[answer:])
            questions.append(Question(domain, cutter.index, context, choices, answer))
            going_on.append(cutter)
        cutters = going_on
    return questions


class _Cutter:
    """Cuts one document into questions whose true continuations do not overlap."""

    def __init__(self, index: int, text: str, lengths: Lengths, rng: random.Random) -> None:
        self.index = index
        self.text = text
        self.lengths = lengths
        self.rng = rng
        self.borders = _borders(text, lengths.span)
        self.cuts = [border for border in self.borders if border >= lengths.min_context]
        shortest = lengths.min_context + NUM_CHOICES * lengths.span
        self.able = len(text) >= shortest and bool(self.cuts)
        rng.shuffle(self.cuts)

    def next(self) -> tuple[str, ...] | None:
        """Context, true continuation and three others; None when the document is exhausted."""
        for _ in range(min(ATTEMPTS, len(self.cuts))):
            cut = self.cuts.pop()
            spans = self._spans(cut)
            if spans is not None:
                span = self.lengths.span
                self.cuts = [other for other in self.cuts if abs(other - cut) >= span]
                return spans
        return None

    def _spans(self, cut: int) -> tuple[str, ...] | None:
        start = self._context_start(cut)
        end = cut + self.lengths.span
        elsewhere = [
            border
            for border in self.borders
            if border >= end or border + self.lengths.span <= start
        ]
        self.rng.shuffle(elsewhere)
        chosen = self._apart(elsewhere, [self.text[cut:end]])
        if not chosen:
            return None
        return (self.text[start:cut], *chosen)

    def _context_start(self, cut: int) -> int:
        """The first border (or the document's beginning) from which the context is not too long."""
        earliest = cut - self.lengths.context
        if earliest <= 0:
            return 0
        later = (border for border in self.borders if border >= earliest)
        start = next(later, cut)
        return start if cut - start >= self.lengths.min_context else earliest

    def _apart(self, borders: list[int], taken: list[str]) -> list[str]:
        """`taken` with spans at `borders` up to four in all, unlike and not overlapping; or []."""
        span = self.lengths.span
        chosen: list[int] = []
        spans = list(taken)
        for border in borders:
            text = self.text[border : border + span]
            if len(spans) == NUM_CHOICES:
                break
            if text not in spans and all(abs(border - other) >= span for other in chosen):
                chosen.append(border)
                spans.append(text)
        return spans if len(spans) == NUM_CHOICES else []


def _borders(text: str, span: int) -> list[int]:
    """Where a span of mostly visible text may begin, in order.

    The document's own beginning is left out: a title never continues a text.
    """
    lines = _starts(_LINE_START, text, span)
    return lines if len(lines) >= MIN_BORDERS else _starts(_SENTENCE_START, text, span)


def _starts(pattern: re.Pattern[str], text: str, span: int) -> list[int]:
    starts = [match.start() for match in pattern.finditer(text)]
    return [start for start in starts if _is_telling(text[start : start + span], span)]


def _is_telling(span_text: str, span: int) -> bool:
    """Whether a span is whole and at least half of it is visible."""
    return len(span_text) == span and 2 * len("".join(span_text.split())) >= span


def write_questions(questions: Iterable[Question], path: Path) -> None:
    """One JSON object a line, which `tasks/continuation.yaml` reads."""
    with path.open("w", encoding="utf-8") as file:
        for question in questions:
            file.write(json.dumps(asdict(question), ensure_ascii=False) + "\n")
