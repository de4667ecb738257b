"""What the pipeline costs around a step: speed of a run through Ray Train over that of a bare loop.

Method: the tiny model of conf/model in emulated NVFP4, two micro-batches of 4 rows of 256 tokens a
step, FP32 activations, one thread. Two processes take the same steps on the same rows:

    bare       a loop over batches in memory: forward, backward, norm, clipping, AdamW; no Ray, no
               reader, no records
    pipeline   `train_on_workers` with one Ray worker: the reader, records of each step, all checks;
               no validation and no checkpoint in the measured steps

When both are warm they take turns of a second: one is stopped, with all that it has started
(SIGSTOP), while the other goes on, so that both meet the same machine. A step's time is what passed
of it in its process's turns; the mean counts. `fifths` are the ratios in fifths of the measured
time, to show what noise is left.

    ratios   pipeline_vs_bare_loop = bare's seconds / pipeline's, a step (goal: at least 0.97)

    python benchmarks/loop_overhead.py [--json] [--pairs 40] [--seconds 1]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import show
from pipeline.config import Config, PhaseConfig, from_dict
from pipeline.data.shards import open_corpus
from pipeline.data.stream import Batch, MixtureStream
from pipeline.runs import RunFolder
from pipeline.train.build import build_mixture
from pipeline.train.feed import requests_of
from pipeline.train.metrics import read_records
from pipeline.train.optim import build_optimizer
from pipeline.train.parallel import Rank
from pipeline.train.schedule import Schedule
from pipeline.train.trainable import build_trainable

LENGTH, ROWS, MICRO_BATCHES, WARM_UP = 256, 4, 2, 4
STEP_TOKENS = LENGTH * ROWS * MICRO_BATCHES
STEPS = 10_000  # more than are ever taken
IN_MEMORY = 60  # steps whose batches the bare loop holds
PATIENCE = 300.0  # seconds until both are warm
Step = tuple[float, float]  # when it ended, and how many seconds it took


def config_of(root: Path) -> Config:
    with initialize_config_module("conf", version_base="1.3"):
        raw: Any = OmegaConf.to_container(compose("config"), resolve=True)
    config = from_dict(raw)
    train = replace(
        config.train, tokens=STEPS * STEP_TOKENS, sequence_length=LENGTH, micro_batch=ROWS,
        global_batch=ROWS * MICRO_BATCHES, phases=(PhaseConfig(blend={"text": 1.0}),),
        warmup_tokens=0, checkpoint_every_tokens=0, validate_every_tokens=0,
        statistics_every_steps=0,
    )  # fmt: skip
    data = replace(config.data, sources={"text": config.data.sources["prose"]})
    cluster = replace(config.cluster, workers=1)
    return replace(config, root=str(root), train=train, data=data, cluster=cluster)


def bare(config: Config, folder: Path) -> None:
    """Steps without an end; the time after each goes to a file."""
    torch.set_num_threads(1)
    trainable = build_trainable(config, torch.device("cpu"))
    model, precision = trainable.model, trainable.precision
    optimizer = build_optimizer(model, config.train)
    with (folder / "bare").open("w", buffering=1) as times:
        for step, batches in enumerate(cycle(batches_of(config, folder / "corpus"))):
            for i, batch in enumerate(batches):
                precision.begin(step, i)
                loss, _ = model.loss(batch.tokens_BT, batch.labels_BT, batch.seq_idx_BT)
                (loss / STEP_TOKENS).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            times.write(f"{time.time()}\n")


def batches_of(config: Config, corpus: Path) -> list[list[Batch]]:
    """The micro-batches of the first steps of the plan."""
    dataset = open_corpus(config.data, corpus)
    schedule = Schedule.of(config.train, ("text",))
    mixture = build_mixture(config, schedule, dataset)
    stream = MixtureStream(dataset, mixture, schedule.unit_length, across_documents=False)
    requests = [r for step in range(IN_MEMORY) for r in requests_of(schedule, ROWS, Rank(), step)]
    found = stream.iterate(iter(requests), prefetch_bytes=2**28, executor="mmap", pin=False)
    return [list(islice(found, MICRO_BATCHES)) for _ in range(IN_MEMORY)]


def pipeline(config: Config, folder: Path) -> None:
    """A run without an end; the time of each step is in its records."""
    from pipeline.ray_session import ray_session
    from pipeline.train.driver import train_on_workers

    with ray_session():
        train_on_workers(config, RunFolder(folder / "run"), folder / "corpus")


def times_of(name: str, folder: Path) -> list[float]:
    """When each step ended, so far."""
    if name == "bare":
        file = folder / "bare"
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        return [float(line) for line in lines if line.endswith("\n")]
    records = read_records(RunFolder(folder / "run").metrics)
    return [item["time"] for item, _ in records if item["kind"] == "train"]


def take_turns(
    processes: Mapping[str, Sequence[int]], pairs: int, seconds: float
) -> dict[str, list[tuple[float, float]]]:
    """From when to when each went on. They stand still before and after it."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in processes}
    for _ in range(pairs):
        for name, family in processes.items():
            began = time.time()
            send(family, signal.SIGCONT)
            time.sleep(seconds)
            send(family, signal.SIGSTOP)
            turns[name].append((began, time.time()))
    return turns


def steps_of(ends: Sequence[float], turns: Sequence[tuple[float, float]]) -> list[Step]:
    """When each step ended, and the seconds of it that lie within turns."""
    first = turns[0][0]
    return [
        (end, sum(max(0.0, min(end, until) - max(start, since)) for since, until in turns))
        for start, end in pairwise(ends)
        if start >= first
    ]


def ratio_of(steps: Mapping[str, Sequence[Step]], since: float, until: float) -> float:
    """Of the mean steps that ended then."""
    mean = {
        name: statistics.mean(seconds for end, seconds in found if since <= end < until)
        for name, found in steps.items()
    }
    return mean["bare"] / mean["pipeline"]


def warmed_up(name: str, folder: Path) -> list[int]:
    """Ids of a process that has taken its first steps and of all its children; they stand still."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    command = [sys.executable, __file__, "--one", name, "--folder", str(folder)]
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + PATIENCE
    while len(times_of(name, folder)) < WARM_UP:
        if process.poll() is not None or time.monotonic() > deadline:
            send(family_of(process), signal.SIGKILL)
            raise RuntimeError(f"{name}: no {WARM_UP} steps in {PATIENCE:.0f} s")
        time.sleep(0.2)
    family = family_of(process)
    send(family, signal.SIGSTOP)
    return family


def family_of(process: psutil.Process) -> list[int]:
    """The ids of a process and of all that it started, children first."""
    return [one.pid for one in [*reversed(process.children(recursive=True)), process]]


def send(family: Sequence[int], number: int) -> None:
    """A signal to all of them that are there still."""
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def write_corpus(folder: Path, vocab_size: int) -> None:
    """Random documents, some 1,200 units of them."""
    from tests.data import corpora

    corpora.VOCAB_SIZE = vocab_size
    generator = np.random.default_rng(0)
    documents = [
        np.append(generator.integers(1, vocab_size, 600), 0).astype(np.int64) for _ in range(500)
    ]
    corpora.write_corpus(folder / "corpus", {"text": documents}, holdout=documents[:30])


def measure(pairs: int, seconds: float) -> dict[str, list[Step]]:
    families: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, config_of(folder).model.vocab_size)
        RunFolder(folder / "run").path.mkdir()
        try:
            for one in ("pipeline", "bare"):
                families[one] = warmed_up(one, folder)
            turns = take_turns(families, pairs, seconds)
            return {one: steps_of(times_of(one, folder), turns[one]) for one in families}
        finally:
            for family in families.values():
                send(family, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=40, help="turns of each")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--one", choices=("bare", "pipeline"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        run = bare if arguments.one == "bare" else pipeline
        run(config_of(arguments.folder), arguments.folder)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave no process behind
    steps = measure(arguments.pairs, arguments.seconds)
    ends = [end for found in steps.values() for end, _ in found]
    first, fifth = min(ends), (max(ends) - min(ends)) / 5
    fifths = [ratio_of(steps, first + i * fifth, first + (i + 1) * fifth) for i in range(5)]
    rows = [
        {"name": name, "milliseconds_a_step": round(1e3 * mean, 1), "steps": len(found),
         "tokens_per_second": round(STEP_TOKENS / mean)}
        for name, found in steps.items()
        for mean in [statistics.mean(seconds for _, seconds in found)]
    ]  # fmt: skip
    result = {
        "machine": f"{platform.machine()}, one thread, torch {torch.__version__}",
        "rows": rows,
        "ratios": {"pipeline_vs_bare_loop": round(ratio_of(steps, first, float("inf")), 3)},
    }
    show(
        __doc__,
        result,
        f"{'':10}{'ms a step':>12}{'tokens/s':>10}{'steps':>8}",
        lambda row: (
            f"{row['name']:10}{row['milliseconds_a_step']:>12}{row['tokens_per_second']:>10}"
            f"{row['steps']:>8}"
        ),
        [f"fifths: {', '.join(f'{ratio:.3f}' for ratio in fifths)}"],
        as_json=arguments.json,
    )


if __name__ == "__main__":
    main()
