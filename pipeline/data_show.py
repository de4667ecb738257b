"""The verbs `data show` and `data inspect`: what a corpus holds and how a plan goes through it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipeline.config import Config, ConfigError, nearest
from pipeline.data.lookup import documents_in
from pipeline.data.shards import open_corpus
from pipeline.data.tokenizer import load_tokenizer
from pipeline.train.build import build_mixture
from pipeline.train.schedule import Schedule

WIDTH = 12  # of a column with a source's name


def describe_corpus(config: Config, folder: Path, schedule: Schedule) -> Iterator[str]:
    """Lines on sources and tokens, on phases, and on how often each phase sees each source.

    Warns of a source that the plan sees more often than `data.max_epochs`.
    """
    dataset = open_corpus(config.data, folder)
    yield f"corpus      {folder}"
    yield f"content     {dataset.content_hash[:12]}, {dataset.vocab_size:,} ids"
    yield ""
    yield f"{'source':{WIDTH}} {'documents':>12} {'bytes':>16} {'tokens':>16} {'held out':>12}"
    for name, entry in dataset.manifest["sources"].items():
        yield (
            f"{name:{WIDTH}} {entry['documents']:>12,} {entry['bytes']:>16,} "
            f"{entry['tokens']:>16,} {entry['holdout']['tokens']:>12,}"
        )
    yield ""
    mixture = build_mixture(config, schedule, dataset)
    epochs = _epochs(mixture.epochs(), schedule)
    for number, (phase, seen) in enumerate(zip(schedule.phases, epochs, strict=True), start=1):
        tokens = (phase.end_step - phase.start_step) * schedule.tokens_per_step
        yield (
            f"phase {number}     steps {phase.start_step} to {phase.end_step - 1}, {tokens:,} "
            f"tokens, rows of {phase.sequence_length}, learning rate {phase.learning_rate}, "
            f"precision {phase.precision}"
        )
        for name, share in phase.blend.items():
            yield f"  {name:{WIDTH}} {share:7.2%} of tokens, seen {seen[name]:.2f} times"
    total = {name: sum(seen[name] for seen in epochs) for name in mixture.names}
    for name, times in total.items():
        if times > config.data.max_epochs:
            yield (
                f"warning: {name} is seen {times:.1f} times in all, more than "
                f"data.max_epochs={config.data.max_epochs:g}"
            )


def describe_row(config: Config, folder: Path, source: str | None, row: int) -> Iterator[str]:
    """A unit of a source, document by document, as the model reads it. Raises `ConfigError`."""
    dataset, length = open_corpus(config.data, folder), config.train.sequence_length
    if source not in dataset.sources:
        raise ConfigError(
            f"source={source}: name a source of the corpus; {nearest(str(source), dataset.sources)}"
        )
    count = dataset.num_units(source, length)
    if not 0 <= row < count:
        raise ConfigError(f"row={row}: {source} has rows 0 to {count - 1} of {length} tokens")
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    shards = ", ".join(dataset.shards_of_unit(source, row, length))
    yield f"{source} row {row} of 0 to {count - 1}, tokens {row * length:,} on, {shards}"
    for document in documents_in(dataset, source, row * length, length, tokenizer, whole=True):
        edges = [word for word in ("begins", "ends") if getattr(document, word)]
        where = " and ".join(edges) or "goes on"
        yield f"\n-- document {document.number}, {len(document.tokens)} tokens, {where}"
        yield json.dumps(document.text, ensure_ascii=False)


def _epochs(per_blend: list[dict[str, float]], schedule: Schedule) -> list[dict[str, float]]:
    """Epochs by phase, where the mixture counts phases of one blend as one: by their lengths."""
    borders = [until for until, _ in schedule.mixture_phases()]
    starts = [0, *borders[:-1]]
    epochs = []
    for phase in schedule.phases:
        first = phase.start_step * schedule.global_batch
        last = phase.end_step * schedule.global_batch
        index = int(np.searchsorted(borders, first, side="right"))
        part = (last - first) / (borders[index] - starts[index])
        epochs.append({name: times * part for name, times in per_blend[index].items()})
    return epochs
