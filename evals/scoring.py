"""Likelihoods of continuations: grouped by context, batched by length, a context computed once.

A `Group` is a context with all the continuations that were asked of it, such as the choices of a
question. Batches of groups are planned ahead, by the requests alone, so that any number of workers
computes the same batches, and gets the same numbers.

Legend: B rows, T positions, N scored tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evals.lm import LanguageModel, Stop

HEAD_ELEMENTS = 1 << 26
"""Logits computed at a time: 256 MiB in FP32."""
WORTH_SHARING = 8
"""Tokens of a context below which its continuations bring it along: a pass saved is worth more."""
MARGIN = 8
"""Tokens looked at beyond a stop string's bytes: those that a cut may leave without a character."""

Score = tuple[float, bool]


@dataclass(frozen=True)
class Group:
    """A context's tokens, and the continuations to score after it, each its place in the plan."""

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.context) + max(map(len, self.continuations))

    def split(self, size: int) -> Iterator[Group]:
        """Groups of at most `size` continuations, of similar length."""
        order = sorted(range(len(self.places)), key=lambda i: -len(self.continuations[i]))
        for start in range(0, len(order), size):
            part = order[start : start + size]
            continuations = tuple(self.continuations[i] for i in part)
            yield Group(self.context, continuations, tuple(self.places[i] for i in part))


def plan_batches(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], batch_size: int, *, share: bool
) -> list[list[Group]]:
    """Batches of at most `batch_size` continuations; each pair's place is in exactly one.

    The longest come first, so that memory runs out at once if it does. In a batch either every
    group has one continuation, or every group shares its context.

    Args:
        pairs: context and continuation tokens.
        share: whether the model can compute a context once for several continuations.
    """
    together: dict[tuple[int, ...], list[int]] = {}
    for place, (context, _) in enumerate(pairs):
        together.setdefault(tuple(context), []).append(place)
    single: list[Group] = []
    shared: list[Group] = []
    for context, places in together.items():
        group = Group(context, tuple(tuple(pairs[i][1]) for i in places), tuple(places))
        if share and len(places) > 1 and len(context) >= WORTH_SHARING:
            shared += group.split(batch_size)
        else:
            single += group.split(1)
    return [*_batches(single, batch_size), *_batches(shared, batch_size)]


def _batches(groups: list[Group], batch_size: int) -> Iterator[list[Group]]:
    batch: list[Group] = []
    for group in sorted(groups, key=lambda group: (-group.length, group.places)):
        if sum(len(each.places) for each in [*batch, group]) > batch_size:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


@torch.no_grad()
def score_groups(lm: LanguageModel, groups: Sequence[Group]) -> list[Score]:
    """Each continuation's log-likelihood (nats) and whether it is the greedy one, in order."""
    if all(len(group.continuations) == 1 for group in groups):
        return _score_whole(lm, groups)
    return _score_after_shared(lm, groups)


def _score_whole(lm: LanguageModel, groups: Sequence[Group]) -> list[Score]:
    """One forward pass over contexts with their continuations, padded on the right."""
    labels = [group.continuations[0] for group in groups]
    starts = [len(group.context) - 1 for group in groups]
    sequences = [group.context + group.continuations[0][:-1] for group in groups]
    hidden_BTD = lm.hidden(_right_pad(sequences, lm.device))
    return _scores(lm, hidden_BTD, labels, starts)


def _score_after_shared(lm: LanguageModel, groups: Sequence[Group]) -> list[Score]:
    """The contexts once; then, from their states, all continuations but their last tokens."""
    labels = [each for group in groups for each in group.continuations]
    rows = [row for row, group in enumerate(groups) for _ in group.continuations]
    room = max(len(each) for each in labels) - 1
    logits_BV, state = lm.prefill([group.context for group in groups], room)
    first_BV = logits_BV.float().log_softmax(dim=-1)
    best_B = first_BV.argmax(dim=-1).tolist()
    scores = [
        (first_BV[row, each[0]].item(), best_B[row] == each[0]) if each else (0.0, True)
        for row, each in zip(rows, labels, strict=True)
    ]
    if room < 1:
        return scores
    hidden_BTD = lm.extend(
        _right_pad([each[:-1] for each in labels], lm.device), lm.select(state, rows)
    )
    later = _scores(lm, hidden_BTD, [each[1:] for each in labels], [0] * len(labels))
    return [(a + b, x and y) for (a, x), (b, y) in zip(scores, later, strict=True)]


def _scores(
    lm: LanguageModel,
    hidden_BTD: Tensor,
    labels: Sequence[Sequence[int]],
    starts: Sequence[int],
) -> list[Score]:
    """Scores of each row's labels, the first of which is predicted at the row's start."""
    picked_ND = torch.cat(
        [
            row_TD[start : start + len(each)]
            for row_TD, each, start in zip(hidden_BTD, labels, starts, strict=True)
        ]
    )
    labels_N = torch.tensor([token for each in labels for token in each], device=lm.device)
    nats, greedy = [], []
    for part in _head_parts(lm, picked_ND):
        log_probs_NV = lm.head(picked_ND[part]).float().log_softmax(dim=-1)
        nats.append(log_probs_NV.gather(1, labels_N[part, None]).squeeze(1).double().cpu())
        greedy.append((log_probs_NV.argmax(dim=-1) == labels_N[part]).cpu())
    lengths = [len(each) for each in labels]
    return [
        (nats_T.sum().item(), bool(greedy_T.all()))
        for nats_T, greedy_T in zip(
            _joined(nats).split(lengths), _joined(greedy).split(lengths), strict=True
        )
    ]


def _head_parts(lm: LanguageModel, picked_ND: Tensor) -> Iterator[slice]:
    if not len(picked_ND):
        return
    vocab_size = lm.head(picked_ND[:1]).shape[-1]
    size = max(HEAD_ELEMENTS // vocab_size, 1)
    for start in range(0, len(picked_ND), size):
        yield slice(start, start + size)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0)


def _right_pad(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[B, T] int64; the padding follows what is scored, where a causal model never sees it."""
    tokens_BT = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        tokens_BT[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
    return tokens_BT.to(device)


@dataclass(frozen=True)
class Prompts:
    """Prompts that are continued together, to the same limit and the same stop strings."""

    prompts: tuple[tuple[int, ...], ...]
    limit: int
    stops: tuple[str, ...]


class Scorer:
    """Computes batches, in this process or as a worker's: a model with its tokenizer."""

    def __init__(self, lm: LanguageModel, tokenizer: Any, eos_id: int) -> None:
        self.lm, self.tokenizer, self.eos_id = lm, tokenizer, eos_id

    def score(self, groups: Sequence[Group]) -> list[Score]:
        """See `score_groups`."""
        return score_groups(self.lm, groups)

    @torch.no_grad()
    def continue_prompts(self, batch: Prompts) -> list[str]:
        """The greedy continuation of each prompt, up to the first stop string."""
        outputs = self.lm.generate(batch.prompts, batch.limit, self.eos_id, self._stop(batch))
        return [
            before_first(self.tokenizer.decode(list(tokens)), batch.stops) for tokens in outputs
        ]

    def _stop(self, batch: Prompts) -> Stop:
        longest = max((len(stop.encode()) for stop in batch.stops), default=0)

        def should_stop(row: int, new_tokens: list[int]) -> bool:
            text = self.tokenizer.decode(new_tokens[-longest - MARGIN :])
            return any(stop in text for stop in batch.stops)

        return should_stop


def before_first(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of the stop strings."""
    return text[: min([text.find(stop) for stop in stops if stop in text], default=len(text))]
