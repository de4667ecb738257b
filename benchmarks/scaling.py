"""What the reproducible reduction costs, and how many bytes gathering weights as codes saves.

Method: the tiny model of conf/model, recipe nvfp4_paper, BF16 compute. A step is `--batch` rows of
256 tokens on each rank, in two micro-batches: forward, backward, sums, norm, clipping, AdamW. Time
is rank 0's, one thread a rank; candidates alternate, medians count, a warm-up round comes first.

    whole, plain            one process that holds everything: FP32 sums as they come
    whole, reproducible     the same with integer sums
    shared, plain           two gloo ranks that share one copy (FSDP2), weights gathered as codes
    shared, reproducible    the same with integer sums
    shared, values          as `shared, plain`, weights gathered in BF16

Bytes are what one rank gives to one gather of the linears that the recipe quantizes in 16 x 16
blocks, and for comparison to one gather of all the blocks' parameters.

    ratios   reproducible_vs_plain = time of plain / time of reproducible, on one process
             reproducible_vs_plain_shared = the same on two ranks
             gather_bytes = BF16's bytes / codes' bytes, quantized linears (goal: at least 3.4)
             gather_bytes_all = the same, all parameters of the blocks

    python benchmarks/scaling.py [--json] [--rounds 7] [--batch 8]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import HybridModel, ModelConfig
from pipeline.config import Config, from_dict
from pipeline.data.stream import Batch
from pipeline.train.optim import build_optimizer
from pipeline.train.sharding import Sharding, fsdp_modules
from pipeline.train.step import train_step
from pipeline.train.trainable import Trainable, assemble
from quant import apply_recipe, named_recipe

LENGTH = 256
CASES = {  # (shards, reproducible, codes)
    "whole, plain": (1, False, True),
    "whole, reproducible": (1, True, True),
    "shared, plain": (0, False, True),
    "shared, reproducible": (0, True, True),
    "shared, values": (0, False, False),
}


def default_config() -> Config:
    with initialize_config_module("conf", version_base="1.3"):
        raw: Any = OmegaConf.to_container(compose("config"), resolve=True)
    return from_dict(raw)


def build(name: str) -> Trainable:
    shards, reproducible, codes = CASES[name]
    base = default_config()
    shape = ModelConfig.from_dict(asdict(base.model))
    cpu = torch.device("cpu")
    sharding = Sharding.over(shards, cpu)
    with torch.device("meta") if sharding.mesh else contextlib.nullcontext():
        model = HybridModel(shape, torch.bfloat16)
    precision = apply_recipe(
        model, named_recipe("nvfp4_paper").with_blocks(1, 1), num_blocks=len(shape.pattern), seed=0,
        weight_dtype=torch.bfloat16,
    )  # fmt: skip
    train = replace(base.train, reproducible=reproducible)
    cluster = replace(base.cluster, shard=shards, fp4_gather=codes)
    return assemble(model, precision, sharding, replace(base, train=train, cluster=cluster), cpu)


def stepper(trainable: Trainable, batch: int) -> Callable[[int], float]:
    """Takes a step and returns its seconds."""
    optimizer = build_optimizer(trainable.model, default_config().train)
    optimizer.register_step_post_hook(trainable.changed)
    generator = torch.Generator().manual_seed(0)
    vocabulary = trainable.model.config.vocab_size
    tokens = torch.randint(1, vocabulary, (2, batch // 2, LENGTH + 1), generator=generator)
    documents = torch.zeros(batch // 2, LENGTH, dtype=torch.int32)
    source = torch.zeros(batch // 2, dtype=torch.int64)
    micro_batches = [
        (i, Batch(tokens[i, :, :-1], tokens[i, :, 1:], documents, source, i, batch // 2))
        for i in range(2)
    ]

    def step(number: int) -> float:
        start = time.perf_counter()
        trainable.prepare()
        train_step(
            trainable.model, trainable.precision, optimizer, micro_batches, step=number,
            learning_rate=1e-3, clip_norm=1.0, reduction=trainable.reduction,
        )  # fmt: skip
        return time.perf_counter() - start

    return step


def measure(names: list[str], rounds: int, batch: int) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    built = {name: build(name) for name in names}
    steps = {name: stepper(trainable, batch) for name, trainable in built.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names:
            seconds[name].append(steps[name](number))
    rows = {}
    for name, trainable in built.items():
        rows[name] = {"milliseconds": round(1e3 * statistics.median(seconds[name][1:]), 1)}
        if trainable.weights is not None:
            rows[name] |= bytes_given(trainable)
    return rows


def bytes_given(trainable: Trainable) -> dict[str, int]:
    """What this rank gives to one gather."""
    assert trainable.weights is not None
    trainable.prepare()
    quantized = everything = 0
    for module in fsdp_modules(trainable.model)[1:]:  # the blocks
        for held in module._get_fsdp_state()._fsdp_param_groups[0].fsdp_params:
            size = sum(t.nbytes for t in held.all_gather_inputs)
            everything += size
            layer = getattr(held._sharded_local_tensor, "layer", None)
            if layer is not None and layer.recipe.weight.format:
                quantized += size
    return {"bytes_quantized": quantized, "bytes_all": everything}


def on_rank(rank: int, meeting: str, out: str, rounds: int, batch: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    rows = measure([name for name in CASES if name.startswith("shared")], rounds, batch)
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    size = (arguments.rounds, arguments.batch)
    rows = measure([name for name in CASES if name.startswith("whole")], *size)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        torch.multiprocessing.spawn(on_rank, (f"{folder}/meeting", str(out), *size), nprocs=2)
        rows |= json.loads(out.read_text())

    def ratio(above: str, below: str, key: str) -> float:
        return round(rows[above][key] / rows[below][key], 3)

    ratios = {
        "reproducible_vs_plain": ratio("whole, plain", "whole, reproducible", "milliseconds"),
        "reproducible_vs_plain_shared": ratio(
            "shared, plain", "shared, reproducible", "milliseconds"
        ),
        "gather_bytes": ratio("shared, values", "shared, plain", "bytes_quantized"),
        "gather_bytes_all": ratio("shared, values", "shared, plain", "bytes_all"),
    }
    machine = f"{platform.machine()}, one thread a rank, torch {torch.__version__}"
    table = [{"name": name, **row} for name, row in rows.items()]
    if arguments.json:
        print(json.dumps({"machine": machine, "rows": table, "ratios": ratios}))
        return
    print(__doc__)
    print(machine)
    print(f"{'':24}{'ms':>10}{'bytes, quantized':>18}{'bytes, all':>12}")
    for name, row in rows.items():
        sizes = [row.get(key, "") for key in ("bytes_quantized", "bytes_all")]
        print(f"{name:24}{row['milliseconds']:>10}{sizes[0]:>18}{sizes[1]:>12}")
    for name, value in ratios.items():
        print(f"{name} = {value}")


if __name__ == "__main__":
    main()
