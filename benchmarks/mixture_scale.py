"""What the mixture costs at full scale, and a proof that the 12B plan loses and repeats no unit.

Method, cost: 10T tokens in units of 8,192, 40 sources of unequal size and weight in two phases.
Time and traced memory of building; the time to locate a million consecutive units at the plan's
start and from unit 10^9 on, the best of three.

Method, proof: the configuration `experiment=12b_nvfp4` at 512 ranks, walked by simulated attempts:
each begins at a checkpoint with some number of ranks (of 64 to 768, many of which divide nothing)
and dies at a random step. Around boundaries of phases, deaths and random steps, a window of steps
is read rank by rank with the training loop's own function, everything after the last checkpoint of
an attempt that died is thrown away, and what stays must be every planned unit of the window exactly
once, in order; each source's rows must be the next ones of its own order.

    python benchmarks/mixture_scale.py [--json] [--attempts 400] [--windows 60] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.data.mixture import Mixture
from pipeline.train.feed import requests_of
from pipeline.train.parallel import Rank
from pipeline.train.schedule import Schedule

MILLION = 10**6
WINDOW = 24  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--attempts", type=int, default=400)
    parser.add_argument("--windows", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    cost, proof = measure_cost(), prove(arguments)
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, numpy {np.__version__}",
        "rows": [cost, proof],
        "ratios": {
            "build_s": cost["build_s"],
            "build_mib": cost["build_mib"],
            "locate_million_s": cost["locate_million_s"],
            "far_vs_near": cost["far_vs_near"],
            "units_lost_or_repeated": proof["units_lost_or_repeated"],
        },
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(__doc__)
    print(result["machine"])
    for row in result["rows"]:
        print("\n".join(f"{name:32} {value:,}" for name, value in row.items()))


def measure_cost() -> dict[str, float]:
    """Building and locating at 10T tokens with 40 sources."""
    units = 10**13 // 8192
    weights = {f"source{i:02}": 1.0 + i for i in range(40)}
    sizes = {name: int(1e6 * weight) for name, weight in weights.items()}
    later = {name: 41 - weight for name, weight in weights.items()}
    phases = [(units * 7 // 10, weights), (units, later)]
    began = time.perf_counter()
    mixture = Mixture(sizes, phases)
    build = time.perf_counter() - began
    tracemalloc.start()
    Mixture(sizes, phases)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    def locate(first: int) -> float:
        began = time.perf_counter()
        mixture.locate(np.arange(first, first + MILLION))
        return time.perf_counter() - began

    times = np.array([[locate(0), locate(10**9)] for _ in range(3)]).min(axis=0)
    return {
        "units": units,
        "build_s": round(build, 3),
        "build_mib": round(memory / 2**20, 1),
        "locate_million_s": round(float(times[0]), 3),
        "locate_million_at_1e9_s": round(float(times[1]), 3),
        "far_vs_near": round(float(times[1] / times[0]), 2),
    }


# ---- The proof ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """A start of the run: from a checkpoint on, with some ranks, up to the step it dies before."""

    first_step: int
    ranks: int
    end_step: int


def prove(arguments: argparse.Namespace) -> dict[str, int]:
    """Walk the 12B's plan. Raises `AssertionError` for a unit lost or repeated."""
    config = composed("12b_nvfp4")
    schedule = Schedule.of(config.train, tuple(config.data.sources))
    mixture = Mixture(
        {name: 30_000_000 + 7 * i for i, name in enumerate(config.data.sources)},
        schedule.mixture_phases(),
        block=config.data.mixture_block,
        seed=config.data.seed,
    )
    every = max(1, config.train.checkpoint_every_tokens // schedule.tokens_per_step)
    random = np.random.default_rng(arguments.seed)
    attempts = simulate(schedule.num_steps, every, arguments.attempts, random)
    places = [*schedule.boundaries(), *(attempt.end_step for attempt in attempts[:-1:8])]
    places += random.integers(0, schedule.num_steps, arguments.windows - len(places)).tolist()
    checked = replayed = 0
    for place in places:
        first = max(0, min(int(place) - WINDOW // 2, schedule.num_steps - WINDOW))
        units, again = walk(attempts, schedule, config.train.micro_batch, first, first + WINDOW)
        replayed += again
        start, stop = first * schedule.global_batch, (first + WINDOW) * schedule.global_batch
        assert np.array_equal(units, np.arange(start, stop)), f"steps from {first} on"
        check_sources(mixture, units)
        checked += len(units)
    return {
        "steps": schedule.num_steps,
        "attempts": len(attempts),
        "world_sizes": len({attempt.ranks for attempt in attempts}),
        "windows": len(places),
        "units_checked": checked,
        "units_read_again_after_a_death": replayed,
        "units_lost_or_repeated": 0,  # else an assertion has failed
    }


def composed(experiment: str) -> Any:
    """The configuration of an experiment, as the command line would have it."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    from pipeline.config import from_dict

    with initialize_config_module("conf", version_base=None):
        raw: Any = OmegaConf.to_container(compose("config", [f"+experiment={experiment}"]))
    return from_dict(raw)


def simulate(num_steps: int, every: int, count: int, random: np.random.Generator) -> list[Attempt]:
    """Attempts that bring a run to its end, each from the last checkpoint before a death on."""
    attempts: list[Attempt] = []
    first, deaths = 0, np.sort(random.integers(1, num_steps, count - 1)).tolist()
    for death in [*deaths, num_steps]:
        if death <= first:
            continue
        attempts.append(Attempt(first, 512, death))
        first = death // every * every
    sizes = random.integers(64, 769, len(attempts)).tolist()
    # Half of the restarts find all 512 ranks again.
    return [
        Attempt(each.first_step, size if i % 2 else 512, each.end_step)
        for i, (each, size) in enumerate(zip(attempts, sizes, strict=True))
    ]


def walk(
    attempts: list[Attempt], schedule: Schedule, micro_batch: int, first: int, stop: int
) -> tuple[np.ndarray, int]:
    """The units that the steps first .. stop - 1 trained on, and how many were read in vain."""
    log: list[tuple[int, int]] = []  # step, unit
    read = 0
    for attempt in attempts:
        log = [entry for entry in log if entry[0] < attempt.first_step]  # back to the checkpoint
        for step in range(max(first, attempt.first_step), min(stop, attempt.end_step)):
            done: list[tuple[int, int]] = []
            for index in range(attempt.ranks):
                rank = Rank(index, attempt.ranks)
                for begin, count, _ in requests_of(schedule, micro_batch, rank, step):
                    done += [(step, unit) for unit in range(begin, begin + count)]
            read += len(done)
            log += sorted(done)  # a step's gradients are one sum
    return np.array([unit for _, unit in log]), read - len(log)


def check_sources(mixture: Mixture, units: np.ndarray) -> None:
    """Each source's units are the next ones of its own order, whatever the others do."""
    source, row = mixture.locate(units)
    before = mixture.used(int(units[0]))
    for number, name in enumerate(mixture.names):
        rows = row[source == number]
        alone = Mixture(
            dict(zip(mixture.names, mixture.sizes, strict=True)),
            [(before[name] + len(rows) + 1, {name: 1.0})],
            mixture.block,
            mixture.seed,
        )
        _, expected = alone.locate(np.arange(before[name], before[name] + len(rows)))
        assert np.array_equal(rows, expected), name


if __name__ == "__main__":
    main()
