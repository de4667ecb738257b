"""Documents that share 13 words in a row with an evaluation file.

Words are as in GPT-3 (arXiv 2005.14165, appendix C): lower case, punctuation removed, split at
white space. Every string of an evaluation's records counts by itself; one of fewer than 13 words
can be found nowhere. A document with one overlap is left out whole.

Legend: W words of a document, G its runs of 13 words.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config import ConfigError

NUM_WORDS = 13
_KEY = "data.decontaminate"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_FACTORS = np.array([0x9E3779B97F4A7C15**i % 2**64 for i in range(NUM_WORDS)], dtype=np.uint64)


def words_of(text: str) -> list[str]:
    """The normalised words of a text."""
    return text.lower().translate(_NO_PUNCTUATION).split()


class Evaluations:
    """The runs of 13 words of evaluation files, to compare documents with."""

    def __init__(self, strings: Iterator[str]) -> None:
        words = (words_of(text) for text in strings)
        self._words = [several for several in words if len(several) >= NUM_WORDS]
        vocabulary = {word for several in self._words for word in several}
        self._numbers = {word: i + 1 for i, word in enumerate(sorted(vocabulary))}
        sums = [self._sums(several) for several in self._words]
        runs_of = np.array([len(several) for several in sums], dtype=np.int64)
        all_sums = np.concatenate([np.empty(0, np.uint64), *sums])
        order = np.argsort(all_sums, kind="stable")
        self._sorted = all_sums[order]
        self._string = np.repeat(np.arange(len(sums)), runs_of)[order]
        self._start = (np.arange(len(order)) - np.repeat(runs_of.cumsum() - runs_of, runs_of))[
            order
        ]

    def overlap(self, text: str) -> str | None:
        """The first run of 13 words that the text shares with an evaluation."""
        words = words_of(text)
        if len(words) < NUM_WORDS or not len(self._sorted):
            return None
        sums_G = self._sums(words)
        places_G = np.searchsorted(self._sorted, sums_G).clip(max=len(self._sorted) - 1)
        for i in np.flatnonzero(self._sorted[places_G] == sums_G).tolist():
            run = words[i : i + NUM_WORDS]
            last = np.searchsorted(self._sorted, sums_G[i], side="right")
            if any(self._run(place) == run for place in range(places_G[i], last)):
                return " ".join(run)
        return None

    def _run(self, place: int) -> list[str]:
        start = self._start[place]
        return self._words[self._string[place]][start : start + NUM_WORDS]

    def _sums(self, words: Sequence[str]) -> NDArray[np.uint64]:
        """A hash of each run of 13 words; words of no evaluation are all alike in it."""
        get = self._numbers.get
        number_W = np.fromiter((get(word, 0) for word in words), np.uint64, len(words))
        windows = np.lib.stride_tricks.sliding_window_view(number_W, NUM_WORDS)
        return (windows * _FACTORS).sum(axis=1, dtype=np.uint64)


@lru_cache(1)
def load_evaluations(files: tuple[tuple[str, bytes], ...]) -> Evaluations:
    """The evaluations in files of one JSON value, or one a line. Raises `ConfigError`."""
    return Evaluations(text for uri, raw in files for text in _strings(_records(uri, raw)))


def _records(uri: str, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in raw.splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(f"{_KEY}: {uri} is neither JSON nor JSON lines ({error})") from None


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
