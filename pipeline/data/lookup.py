"""Which documents an optimizer step saw: the plan read backwards, from a step to text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pipeline.data.blocks import DamagedShardError
from pipeline.data.shards import Dataset
from pipeline.data.stream import MixtureStream

CHARACTERS = 60  # of each document's text
TOKENS_DECODED = 60  # at least as many characters, where no token is empty


@dataclass(frozen=True)
class SeenDocument:
    """The part of a document that lies in a unit.

    number: the document's within its source. begins, ends: whether its first and its last token
    are in the unit. text: the part's first characters.
    """

    number: int
    tokens: NDArray[np.unsignedinteger]
    begins: bool
    ends: bool
    text: str


@dataclass(frozen=True)
class SeenUnit:
    """One unit of a step, with its documents in order.

    row: the unit's place in its source. shards: the files that it, and the token that is its last
    label, lie in. blocked: whether it weighed nothing. documents: none where a shard is damaged.
    """

    index: int
    source: str
    row: int
    shards: tuple[str, ...]
    blocked: bool
    documents: tuple[SeenDocument, ...]


def units_of(
    stream: MixtureStream,
    units: range,
    tokenizer: Tokenizer,
    blocked: frozenset[str] = frozenset(),
) -> Iterator[SeenUnit]:
    """The units of a plan with their documents. `blocked` names the shards that weighed nothing."""
    dataset, length = stream.dataset, stream.unit_length
    sources, rows = stream.mixture.locate(np.arange(units.start, units.stop))
    for index, source, row in zip(units, sources.tolist(), rows.tolist(), strict=True):
        name = stream.mixture.names[source]
        shards = tuple(dataset.shards_of_unit(name, row, length))
        try:
            documents = tuple(documents_in(dataset, name, row * length, length, tokenizer))
        except DamagedShardError:
            documents = ()
        yield SeenUnit(index, name, row, shards, not blocked.isdisjoint(shards), documents)


def documents_in(
    dataset: Dataset,
    source: str,
    start: int,
    count: int,
    tokenizer: Tokenizer,
    *,
    whole: bool = False,
) -> Iterator[SeenDocument]:
    """The documents, or their parts, among `count` tokens of a source from `start` on.

    whole: with all of the text, not its beginning alone.
    """
    tokens = dataset.read(source, start, count)
    for number, first, end in dataset.documents_of(source, start, count):
        part = tokens[max(first - start, 0) : end - start]
        shown = part if whole else part[:TOKENS_DECODED]
        text = tokenizer.decode(shown.tolist(), skip_special_tokens=True)
        begins, ends = first >= start, end <= start + count
        yield SeenDocument(number, part, begins, ends, text if whole else text[:CHARACTERS])
