"""What the pipeline costs around a step: speed of a run through Ray Train over that of a bare loop.

Method: the tiny model of conf/model in emulated NVFP4, two micro-batches of 4 rows of 256 tokens a
step, FP32 activations, one thread. Both run in processes of their own:

    bare       a loop over tensors in memory: forward, backward, norm, clipping, AdamW; no Ray, no
               reader, no records
    pipeline   `train_on_workers` with one Ray worker: the reader, records of each step, all checks;
               no validation and no checkpoint in the measured steps

They alternate in `--rounds`; the first steps of each are left out; the median step counts.

    ratios   pipeline_vs_bare_loop = bare's seconds / pipeline's, a step (goal: at least 0.97)

    python benchmarks/loop_overhead.py [--json] [--rounds 3] [--steps 24]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import HybridModel, ModelConfig
from pipeline.config import Config, PhaseConfig, from_dict
from pipeline.runs import RunFolder
from pipeline.train.build import build_recipe
from pipeline.train.metrics import read_records
from pipeline.train.optim import build_optimizer
from quant import apply_recipe

LENGTH, ROWS, MICRO_BATCHES, LEFT_OUT = 256, 4, 2, 4
STEP_TOKENS = LENGTH * ROWS * MICRO_BATCHES


def config_of(root: Path, steps: int) -> Config:
    with initialize_config_module("conf", version_base="1.3"):
        raw: Any = OmegaConf.to_container(compose("config"), resolve=True)
    config = from_dict(raw)
    train = replace(
        config.train, tokens=steps * STEP_TOKENS, sequence_length=LENGTH, micro_batch=ROWS,
        global_batch=ROWS * MICRO_BATCHES, phases=(PhaseConfig(blend={"text": 1.0}),),
        warmup_tokens=0, checkpoint_every_tokens=0, validate_every_tokens=0,
        statistics_every_steps=0,
    )  # fmt: skip
    data = replace(config.data, sources={"text": config.data.sources["prose"]})
    cluster = replace(config.cluster, workers=1)
    return replace(config, root=str(root), train=train, data=data, cluster=cluster)


def bare(config: Config, steps: int) -> list[float]:
    """Seconds of each step."""
    model = HybridModel(ModelConfig.from_dict(asdict(config.model)))
    blocks = len(config.model.pattern)
    precision = apply_recipe(model, build_recipe(config), num_blocks=blocks, seed=0)
    optimizer = build_optimizer(model, config.train)
    generator = torch.Generator().manual_seed(0)
    shape = (steps, MICRO_BATCHES, ROWS, LENGTH + 1)
    tokens = torch.randint(1, config.model.vocab_size, shape, generator=generator)
    documents = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        for i in range(MICRO_BATCHES):
            precision.begin(step, i)
            loss, _ = model.loss(tokens[step, i, :, :-1], tokens[step, i, :, 1:], documents)
            (loss / STEP_TOKENS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    return seconds


def pipeline(config: Config, dataset: Path) -> list[float]:
    """Seconds from each step's record to the next one's."""
    from pipeline.ray_session import ray_session
    from pipeline.train.driver import train_on_workers

    run = RunFolder(Path(config.root) / f"run-{time.time_ns()}")
    run.path.mkdir(parents=True)
    with ray_session():
        train_on_workers(config, run, dataset)
    times = [item["time"] for item, _ in read_records(run.metrics) if item["kind"] == "train"]
    return [after - before for before, after in pairwise(times)]


def write_dataset(folder: Path, vocab_size: int) -> Path:
    """Random documents, some 1,200 units of them."""
    from tests.data import corpora

    corpora.VOCAB_SIZE = vocab_size
    generator = np.random.default_rng(0)
    documents = [
        np.append(generator.integers(1, vocab_size, 600), 0).astype(np.int64) for _ in range(500)
    ]
    return corpora.write_corpus(folder, {"text": documents}, holdout=documents[:30])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--one", choices=("bare", "pipeline"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        torch.set_num_threads(1)
        config = config_of(arguments.folder, arguments.steps)
        made = (
            bare(config, arguments.steps)
            if arguments.one == "bare"
            else pipeline(config, arguments.folder / "corpus")
        )
        (arguments.folder / "seconds.json").write_text(json.dumps(made[LEFT_OUT:]))
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    seconds: dict[str, list[float]] = {"bare": [], "pipeline": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dataset(folder / "corpus", config_of(folder, 1).model.vocab_size)
        for _ in range(arguments.rounds):
            for one, found in seconds.items():
                subprocess.run(
                    [sys.executable, __file__, "--one", one, "--folder", name,
                     "--steps", str(arguments.steps)],
                    check=True, stdout=subprocess.DEVNULL, env=environment,
                )  # fmt: skip
                found += json.loads((folder / "seconds.json").read_text())
    median = {one: statistics.median(found) for one, found in seconds.items()}
    rows = [
        {"name": one, "milliseconds_a_step": round(1e3 * value, 1),
         "tokens_per_second": round(STEP_TOKENS / value)}
        for one, value in median.items()
    ]  # fmt: skip
    ratios = {"pipeline_vs_bare_loop": round(median["bare"] / median["pipeline"], 3)}
    machine = f"{platform.machine()}, one thread, torch {torch.__version__}"
    if arguments.json:
        print(json.dumps({"machine": machine, "rows": rows, "ratios": ratios}))
        return
    print(__doc__)
    print(machine)
    for row in rows:
        print(f"{row['name']:10}{row['milliseconds_a_step']:>10} ms{row['tokens_per_second']:>9}/s")
    print(f"pipeline_vs_bare_loop = {ratios['pipeline_vs_bare_loop']}")


if __name__ == "__main__":
    main()
