"""The order of training: a pure function from a unit's global index to (source, row).

A unit is one row of the longest phase's sequence length; all units hold equally many tokens, so a
weight is a share of tokens. Nothing is drawn and nothing is remembered: resuming, changing phase,
or another number of ranks is `locate` called with other indices.

Three steps lead from an index to a row:

1. *Counts.* A phase is cut into blocks of `block` units, counted from its start. Each block gives
   a source its share rounded down or up; what is lost to rounding moves on to later blocks, so that
   every `CYCLE` blocks hold the shares exactly (to 1/CYCLE of a unit per block).
2. *Places.* A permutation, seeded by (seed, first index of the block), scatters the sources over
   the block. How often a source came before an index is thus known by arithmetic.
3. *Rows.* That count runs on through phases. The n-th unit of a source is element n mod num_units
   of a permutation seeded by (seed, source's name, n div num_units): each epoch visits every row
   once, and no source's order depends on any other source.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.config import ConfigError, nearest
from pipeline.data.permutation import keyed, permute, seed_of

Indices = NDArray[np.int64]
FORMAT = 1  # part of the fingerprint: raise it when the order changes
CYCLE = 4096  # blocks after which the roundings repeat; a power of two
_CHUNK = 1 << 18  # units laid out at once, to bound memory


class Mixture:
    """Sources blended by phases.

    `sources` maps names to their number of units; ids follow its order. `phases` lists
    (index at which the phase ends, {name: weight}); weights need not sum to 1, and a source left
    out has weight 0. Raises `ConfigError` for an unusable blend.
    """

    def __init__(
        self,
        sources: Mapping[str, int],
        phases: Sequence[tuple[int, Mapping[str, float]]],
        block: int = 1024,
        seed: int = 0,
    ) -> None:
        self.names = tuple(sources)
        self.sizes = tuple(int(size) for size in sources.values())
        self.block = block
        self.seed = seed
        self._block_seed = seed_of(seed, "block")
        self._source_seeds = [seed_of(seed, "source", name) for name in self.names]
        self._phases: list[_Phase] = []
        start, used = 0, np.zeros(len(self.names), dtype=np.int64)
        for until, weights in phases:
            phase = self._phase(start, int(until), weights, used)
            self._phases.append(phase)
            start, used = phase.until, phase.used(phase.until)
        if not self._phases:
            raise ConfigError("a mixture needs at least one phase")
        self._untils = np.array([phase.until for phase in self._phases], dtype=np.int64)

    def __len__(self) -> int:
        """Number of units of the whole plan."""
        return self._phases[-1].until

    def locate(self, indices: ArrayLike) -> tuple[Indices, Indices]:
        """Source ids and row ids of units, both int64 in the shape of `indices`.

        Row r of a source is the r-th slice of its token stream. Costs as much anywhere in the plan.
        Raises `ValueError` for an index outside it.
        """
        shape = np.shape(indices)
        flat = np.asarray(indices, dtype=np.int64).reshape(-1)
        if flat.size and (flat.min() < 0 or flat.max() >= len(self)):
            raise ValueError(
                f"index {flat.min() if flat.min() < 0 else flat.max()} lies outside the plan of "
                f"{len(self)} units; extend the last phase"
            )
        source, count = np.empty_like(flat), np.empty_like(flat)
        phase_of = np.searchsorted(self._untils, flat, side="right")
        for number in np.unique(phase_of):
            at = np.flatnonzero(phase_of == number)
            source[at], count[at] = self._phases[number].locate(flat[at])
        return source.reshape(shape), self._rows(source, count).reshape(shape)

    def used(self, index: int) -> dict[str, int]:
        """Units of each source among the indices below `index`: its first so many were taken."""
        number = min(int(np.searchsorted(self._untils, index)), len(self._phases) - 1)
        units = self._phases[number].used(index)
        return dict(zip(self.names, units.tolist(), strict=True))

    def epochs(self) -> list[dict[str, float]]:
        """For each phase, how often it runs through each source's rows."""
        borders = [0, *self._untils.tolist()]
        used = [self.used(border) for border in borders]
        return [
            {
                name: (after[name] - before[name]) / size if size else 0.0
                for name, size in zip(self.names, self.sizes, strict=True)
            }
            for before, after in itertools.pairwise(used)
        ]

    def fingerprint(self, until: int) -> str:
        """SHA-256 of everything that decides the units below `until`.

        What comes later does not enter, so a run may be extended or planned anew from there on;
        nor do sources not used before it.
        """
        phases = []
        sizes: dict[str, int] = {}
        for phase in self._phases:
            if phase.start >= until:
                break
            names = [self.names[i] for i in phase.ids]
            phases.append([min(phase.until, until), dict(zip(names, phase.shares, strict=True))])
            sizes |= {self.names[i]: self.sizes[i] for i in phase.ids}
        plan = [FORMAT, CYCLE, self.seed, self.block, sizes, phases]
        return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()

    def _rows(self, source: Indices, count: Indices) -> Indices:
        """The row that the `count`-th unit of each source is."""
        row = np.empty_like(count)
        for number in np.unique(source):
            at = np.flatnonzero(source == number)
            size = self.sizes[number]
            epoch, position = np.divmod(count[at], size)
            row[at] = permute(position, keyed(self._source_seeds[number], epoch), size)
        return row

    def _phase(self, start: int, until: int, weights: Mapping[str, float], used: Indices) -> _Phase:
        where = f"phase from unit {start} to {until}"
        if until <= start:
            raise ConfigError(f"{where}: ends before it begins; phases must be in order")
        for name, weight in weights.items():
            if name not in self.names:
                raise ConfigError(f"{where}: no source {name!r}; {nearest(name, self.names)}")
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(f"{where}: the weight of {name} must be 0 or more, got {weight}")
            if weight > 0 and self.sizes[self.names.index(name)] < 1:
                raise ConfigError(
                    f"{where}: source {name} is shorter than one unit; add text to it, shorten the "
                    "sequence, or give it weight 0"
                )
        # By name, so that the order of the mapping decides the ids and nothing else.
        names = sorted(name for name, weight in weights.items() if weight > 0)
        if not names:
            raise ConfigError(f"{where}: no source has a weight above 0")
        shares = _shares([weights[name] for name in names], self.block)
        for name, share in zip(names, shares, strict=True):
            if share < CYCLE:
                least = math.ceil(sum(weights[n] for n in names) / weights[name])
                raise ConfigError(
                    f"{where}: {name} would have less than one unit in a block of {self.block}; "
                    f"raise data.mixture_block to {least} at least, or the weight"
                )
        ids = np.array([self.names.index(name) for name in names], dtype=np.int64)
        table = _prefix_table(shares)
        return _Phase(start, until, ids, shares, table, self.block, self._block_seed, used)


@dataclass(frozen=True)
class _Phase:
    """One phase of the plan, which knows where its blocks put its S active sources."""

    start: int
    until: int
    ids: Indices  # [S] source ids, in the order of their names
    shares: tuple[int, ...]  # units of each in CYCLE blocks
    table: Indices  # [CYCLE + 1, S] units of each in the first so many blocks
    block: int
    block_seed: int
    used_before: Indices  # [all sources] units taken by earlier phases

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """Source id of each index, and how many units of that source came before it."""
        block, place = np.divmod(indices - self.start, self.block)
        order = np.argsort(block, kind="stable")
        blocks, first = np.unique(block[order], return_index=True)
        source, count = np.empty_like(indices), np.empty_like(indices)
        step = max(1, _CHUNK // self.block)
        for i in range(0, len(blocks), step):
            end = first[i + step] if i + step < len(blocks) else len(order)
            at = order[first[i] : end]
            row = np.searchsorted(blocks[i : i + step], block[at])
            slots, counts = self._layout(blocks[i : i + step])
            slot = slots[row, place[at]]
            source[at] = self.ids[slot]
            count[at] = self.used_before[source[at]] + counts[row, place[at]]
        return source, count

    def used(self, index: int) -> Indices:
        """Units of all sources taken by the indices below `index`, at most this phase's end."""
        block, place = divmod(min(index, self.until) - self.start, self.block)
        slots, _ = self._layout(np.array([block]))
        units = self._before(np.array([block]))[0]
        units = units + np.bincount(slots[0, :place], minlength=len(self.ids))
        used = self.used_before.copy()
        used[self.ids] += units
        return used

    def _before(self, blocks: Indices) -> Indices:
        """[B, S] units of each active source in this phase before each block."""
        cycles, rest = np.divmod(blocks, CYCLE)
        return cycles[:, None] * self.table[CYCLE] + self.table[rest]

    def _layout(self, blocks: Indices) -> tuple[Indices, Indices]:
        """[B, block] active source at each place, and its units in this phase before that place."""
        before_BS = self._before(blocks)
        counts_BS = self._before(blocks + 1) - before_BS
        num_blocks, num_sources = counts_BS.shape
        places = np.arange(self.block, dtype=np.int64)
        first = self.start + blocks * self.block
        keys = keyed(self.block_seed, first).view(np.int64)[:, None]
        order = np.argsort(keyed(self.block_seed, keys + places), axis=1)
        sorted_slots = np.repeat(
            np.tile(np.arange(num_sources), num_blocks), counts_BS.reshape(-1)
        ).reshape(num_blocks, self.block)
        slots = np.empty_like(sorted_slots)
        np.put_along_axis(slots, order, sorted_slots, axis=1)
        # A source's places in ascending order, one source after the other: its k-th has k before.
        by_source = np.argsort(slots.astype(np.int16), axis=1, kind="stable")
        group_start = np.cumsum(counts_BS, axis=1) - counts_BS
        rank = places - np.take_along_axis(group_start, sorted_slots, axis=1)
        rank += np.take_along_axis(before_BS, sorted_slots, axis=1)
        counts = np.empty_like(slots)
        np.put_along_axis(counts, by_source, rank, axis=1)
        return slots, counts


def _shares(weights: Sequence[float], block: int) -> tuple[int, ...]:
    """Units of each source in CYCLE blocks: weights as exact fractions, rounded cumulatively."""
    exact = [Fraction(weight).limit_denominator(10**9) for weight in weights]
    total, running = sum(exact), Fraction(0)
    borders = [0]
    for weight in exact:
        running += weight
        borders.append(round(running / total * block * CYCLE))
    return tuple(after - before for before, after in itertools.pairwise(borders))


def _prefix_table(shares: Sequence[int]) -> Indices:
    """[CYCLE + 1, S] units of each source in the first b blocks of a cycle.

    Block b draws the border after each source to floor((border + r) / CYCLE), with r the bits of b
    reversed. All borders of a block share r, so a source's count is its share rounded down or up;
    over a cycle r takes every value once, and sum_r floor((x + r) / n) = x (Hermite).
    """
    bits = CYCLE.bit_length() - 1
    blocks = np.arange(CYCLE, dtype=np.int64)
    reversed_bits = sum(((blocks >> i) & 1) << (bits - 1 - i) for i in range(bits))
    borders = np.concatenate([[0], np.cumsum(shares)])
    counts = np.diff((borders + np.asarray(reversed_bits)[:, None]) // CYCLE, axis=1)
    return np.concatenate([np.zeros((1, len(shares)), np.int64), np.cumsum(counts, axis=0)])
