"""One schedule for all that changes in a run: data, sequence length, learning rate, precision.

The user writes one list of phases, each with a start in tokens; what an entry leaves out goes on
as before (a blend at first: equal shares of all sources). A step always consumes `global_batch`
units of `sequence_length` tokens (a phase with shorter rows cuts its units into more rows), so
steps, units and tokens convert exactly:

    tokens = step * tokens_per_step        unit = step * global_batch

Phase starts are rounded to whole steps. Steps count from 0; `learning_rate(step)` is what that
step's update uses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from pipeline.config import ConfigError, PhaseConfig, TrainConfig, nearest

PRECISION_MODES = ("recipe", "bf16", "bf16_forward")
LEARNING_RATES = ("stable", "decay")


@dataclass(frozen=True)
class Phase:
    """A stretch of steps `[start_step, end_step)` in which nothing but the learning rate moves."""

    start_step: int
    end_step: int
    blend: Mapping[str, float]  # shares of tokens by source; they add up to 1
    sequence_length: int  # tokens a row
    learning_rate: str  # stable (after the warm-up) or decay
    precision: str  # recipe, bf16, or bf16_forward (backward stays quantized)


@dataclass(frozen=True)
class Past:
    """What a forked run takes over from its parent: the phases of the steps before `step`."""

    step: int
    phases: tuple[Phase, ...]
    fingerprint: str  # the parent's, of these steps


@dataclass(frozen=True)
class Schedule:
    """The resolved schedule of a run. Build it with `Schedule.of`."""

    phases: tuple[Phase, ...]
    num_steps: int
    tokens_per_step: int
    global_batch: int  # units a step
    unit_length: int  # tokens a unit: the longest phase's sequence length
    peak: float
    final: float
    warmup_steps: int
    decay_start: int  # first step of the decay; num_steps where there is none
    past: Past | None = None

    @staticmethod
    def of(train: TrainConfig, sources: tuple[str, ...], past: Past | None = None) -> Schedule:
        """Resolve `train.phases` over the named sources. Raises `ConfigError`.

        With a `past` the phases before its step are the parent's; at that step a phase begins if
        anything changes there, and a decay that should have begun before while the parent's rate
        was stable.
        """
        tokens_per_step = train.global_batch * train.sequence_length
        num_steps = -(-train.tokens // tokens_per_step)
        starts = _starts(train, tokens_per_step)
        phases = _fill_in(train, starts, num_steps, sources)
        decays = [phase.start_step for phase in phases if phase.learning_rate == "decay"]
        if past and past.phases[-1].learning_rate == "stable":  # no decay has begun before the fork
            decays = [max(start, past.step) for start in decays]
        if past and past.step >= num_steps:
            raise ConfigError(
                f"train.tokens={train.tokens} ends at step {num_steps}, not after the fork at step "
                f"{past.step}; raise it"
            )
        schedule = Schedule(
            phases=_after(past, phases) if past else phases,
            num_steps=num_steps,
            tokens_per_step=tokens_per_step,
            global_batch=train.global_batch,
            unit_length=train.sequence_length,
            peak=train.learning_rate,
            final=train.final_learning_rate,
            warmup_steps=round(train.warmup_tokens / tokens_per_step),
            decay_start=decays[0] if decays else num_steps,
            past=past,
        )
        if schedule.warmup_steps > schedule.decay_start:
            raise ConfigError(
                f"train.warmup_tokens={train.warmup_tokens}: the warm-up ends at step "
                f"{schedule.warmup_steps}, after the decay starts (step {schedule.decay_start}); "
                "shorten it or train longer"
            )
        return schedule

    def phase_index(self, step: int) -> int:
        """Which phase a step lies in."""
        return sum(phase.start_step <= step for phase in self.phases[1:])

    def phase(self, step: int) -> Phase:
        return self.phases[self.phase_index(step)]

    def learning_rates(self, steps: np.ndarray) -> np.ndarray:
        """WSD: linear warm-up, stable, linear decay that reaches `final` at the last step."""
        steps = np.asarray(steps, dtype=np.float64)
        warmup = np.minimum((steps + 1) / max(self.warmup_steps, 1), 1.0)
        decay = (steps + 1 - self.decay_start) / max(self.num_steps - self.decay_start, 1)
        decay = np.clip(decay, 0.0, 1.0)
        return self.peak * warmup * (1 - decay) + self.final * decay

    def learning_rate(self, step: int) -> float:
        return float(self.learning_rates(np.array([step]))[0])

    def boundaries(self) -> tuple[int, ...]:
        """Steps at which a phase begins: a checkpoint is forced before each."""
        return tuple(phase.start_step for phase in self.phases[1:])

    def mixture_phases(self) -> list[tuple[int, dict[str, float]]]:
        """(first unit after the phase, blend) as `pipeline.data.mixture.Mixture` takes them."""
        merged: list[tuple[int, dict[str, float]]] = []
        for phase in self.phases:
            if merged and merged[-1][1] == dict(phase.blend):
                merged.pop()
            merged.append((phase.end_step * self.global_batch, dict(phase.blend)))
        return merged

    def fingerprint(self, until_step: int) -> str:
        """Hash of all that the schedule decides for the steps before `until_step`.

        Two schedules that agree so far may part later: a run can be extended or re-planned from
        a checkpoint on, but never continued under another past.
        """
        first = self.past.step if self.past else 0
        own = [
            [phase.start_step, dict(phase.blend), phase.sequence_length, phase.precision]
            for phase in self.phases
            if first <= phase.start_step < until_step
        ]
        inherited = [self.past.fingerprint] if self.past else []
        head = json.dumps([self.global_batch, self.unit_length, own, *inherited], sort_keys=True)
        rates = self.learning_rates(np.arange(first, until_step)).astype("<f8")
        return hashlib.sha256(head.encode() + rates.tobytes()).hexdigest()

    def crosses(self, step: int, every_tokens: int) -> bool:
        """Whether the step before `step` crossed a multiple of `every_tokens` (0: never)."""
        if not every_tokens:
            return False
        tokens = step * self.tokens_per_step
        return tokens // every_tokens > (tokens - self.tokens_per_step) // every_tokens

    def until(self, step: int) -> tuple[Phase, ...]:
        """The phases of the steps before `step`, the last one cut there."""
        return tuple(
            replace(phase, end_step=min(phase.end_step, step))
            for phase in self.phases
            if phase.start_step < step
        )

    def describe(self) -> list[dict[str, object]]:
        """The phases as plain values, for results and reports."""
        return [
            {
                "name": f"phase {index + 1}",
                "start_step": phase.start_step,
                "start_tokens": phase.start_step * self.tokens_per_step,
                "blend": dict(phase.blend),
                "sequence_length": phase.sequence_length,
                "learning_rate": phase.learning_rate,
                "precision": phase.precision,
            }
            for index, phase in enumerate(self.phases)
        ]


def _after(past: Past, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """The parent's phases, then these from the fork on. One that only goes on stays one phase."""
    own = [
        replace(phase, start_step=max(phase.start_step, past.step))
        for phase in phases
        if phase.end_step > past.step
    ]
    last, first = past.phases[-1], own[0]
    longer = replace(last, end_step=first.end_step)
    if longer == replace(first, start_step=last.start_step):
        return (*past.phases[:-1], longer, *own[1:])
    return (*past.phases, *own)


def _starts(train: TrainConfig, tokens_per_step: int) -> list[int]:
    """Each phase's first step. Raises `ConfigError` unless they increase from 0."""
    if not train.phases:
        raise ConfigError("train.phases: empty; give at least one phase, {start: 0}")
    starts = [round(_tokens(phase, train) / tokens_per_step) for phase in train.phases]
    if starts[0] != 0:
        raise ConfigError("train.phases[0].start: the first phase starts at 0")
    for index in range(1, len(starts)):
        if starts[index] <= starts[index - 1]:
            raise ConfigError(
                f"train.phases[{index}].start={train.phases[index].start}: it falls on step "
                f"{starts[index]}, not after the phase before it (step {starts[index - 1]}); a "
                f"step has {tokens_per_step} tokens"
            )
    return starts


def _tokens(phase: PhaseConfig, train: TrainConfig) -> float:
    """A phase's start in tokens: a number, or a share of the run such as '70%'."""
    start = phase.start
    if isinstance(start, str) and start.endswith("%"):
        try:
            share = float(start[:-1])
        except ValueError:
            raise ConfigError(f"train.phases: start={start!r} is not a percentage") from None
        start_tokens = share / 100 * train.tokens
    elif isinstance(start, str) and not start.isdigit():
        raise ConfigError(f"train.phases: start={start!r}; give tokens or a share such as 70%")
    else:
        start_tokens = float(start)
    if not 0 <= start_tokens < train.tokens:
        raise ConfigError(
            f"train.phases: start={start!r} lies outside the run's {train.tokens} tokens"
        )
    return start_tokens


def _fill_in(
    train: TrainConfig, starts: list[int], num_steps: int, sources: tuple[str, ...]
) -> tuple[Phase, ...]:
    """The phases with what they leave out taken from the one before."""
    blend: Mapping[str, float] = dict.fromkeys(sources, 1 / len(sources))
    length, rate, precision = train.sequence_length, "stable", "recipe"
    phases = []
    for index, item in enumerate(train.phases):
        path = f"train.phases[{index}]"
        blend = _normalized(item.blend, sources, path) if item.blend else blend
        length = item.sequence_length or length
        if length < 1 or train.sequence_length % length:
            raise ConfigError(
                f"{path}.sequence_length={length} does not divide "
                f"train.sequence_length={train.sequence_length}, the longest row"
            )
        if rate == "decay" and item.learning_rate == "stable":
            raise ConfigError(f"{path}.learning_rate: the decay lasts to the end of the run")
        rate = _choice(item.learning_rate or rate, LEARNING_RATES, f"{path}.learning_rate")
        precision = _choice(item.precision or precision, PRECISION_MODES, f"{path}.precision")
        end = starts[index + 1] if index + 1 < len(starts) else num_steps
        phases.append(Phase(starts[index], end, blend, length, rate, precision))
    return tuple(phases)


def _normalized(
    blend: Mapping[str, float], sources: tuple[str, ...], path: str
) -> Mapping[str, float]:
    for name, weight in blend.items():
        if name not in sources:
            raise ConfigError(f"{path}.blend.{name}: no such source; {nearest(name, sources)}")
        if not 0 <= weight < float("inf"):
            raise ConfigError(
                f"{path}.blend.{name}={weight}: a share cannot be negative or infinite"
            )
    total = sum(blend.values())
    if not total > 0:
        raise ConfigError(f"{path}.blend: the shares add up to {total}; one must be above 0")
    return {name: weight / total for name, weight in blend.items() if weight > 0}


def _choice(value: str, known: tuple[str, ...], path: str) -> str:
    if value not in known:
        raise ConfigError(f"{path}={value!r}: {nearest(value, known)}")
    return value
