"""The verb `compare`. `compare fidelity run=...`: how far each recipe is from BF16 on real weights.

At given checkpoints of a run, on held-out micro-batches of the run's own size: the three GEMMs of
every linear alone, the whole gradient, stochastic rounding over many draws, the two copies of each
weight, and each block quantized alone. Leaves `fidelity/step-<8 digits>` in the run's folder, as
.json (everything), .csv (a row per recipe and tensor) and .png, and prints tables and verdicts.
"""

from __future__ import annotations

import csv
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import Config, ConfigError
from pipeline.data.shards import Dataset, open_corpus
from pipeline.data.stream import validation_rows
from pipeline.fidelity import Rows, Subject, measure
from pipeline.fidelity_report import lines, verdicts
from pipeline.figures import draw_fidelity
from pipeline.report import NO_METADATA
from pipeline.runs import RunFolder
from pipeline.stages import dataset_folder, write_json
from pipeline.train import checkpoint
from pipeline.train.build import build_model, build_recipe
from quant import Recipe
from quant.policy import bf16_blocks


def fidelity(config: Config, run: RunFolder) -> None:
    """Measure, write and print, checkpoint by checkpoint. Raises `ConfigError`."""
    recipes = {name: _recipe(config, name) for name in config.fidelity.recipes}
    found = _checkpoints(run, config.fidelity.steps)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = held_out(open_corpus(config.data, dataset_folder(config, run)), config, device)
    for each in found:
        started = time.perf_counter()
        model = build_model(config, device)
        checkpoint.load_model_tensors(model, each.tensors("model"))
        ends = bf16_blocks(_recipe(config, "nvfp4_paper"), len(config.model.pattern))
        subject = Subject(model, batches, each.step, config.seed, ends)
        result = {"run": run.id, "step": each.step, "precision": config.precision.recipe}
        result |= measure(subject, recipes, config.fidelity.num_draws)
        result["verdicts"] = [dataclasses.asdict(verdict) for verdict in verdicts(result)]
        result["seconds"] = round(time.perf_counter() - started, 1)
        _write(run.fidelity / each.path.name, result)
        print("\n".join(lines(result)), end="\n\n", flush=True)
    print(f"written to {run.fidelity}")


def _recipe(config: Config, name: str) -> Recipe:
    """A recipe by name, with the run's BF16 blocks."""
    precision = dataclasses.replace(config.precision, recipe=name)
    try:
        return build_recipe(dataclasses.replace(config, precision=precision))
    except ValueError as error:
        raise ConfigError(f"fidelity.recipes: {error}") from error


def _checkpoints(run: RunFolder, steps: Iterable[int]) -> list[checkpoint.Checkpoint]:
    if steps:
        try:
            return [checkpoint.at_step(run.checkpoints, step) for step in steps]
        except checkpoint.CheckpointError as error:
            raise ConfigError(f"fidelity.steps: {error}") from error
    found = checkpoint.latest(run.checkpoints)
    if found is None:
        raise ConfigError(
            f"{run.path} has no complete checkpoint to compare on; train first: "
            f"pipeline run resume={run.id}"
        )
    return [found]


def held_out(dataset: Dataset, config: Config, device: torch.device) -> list[Rows]:
    """The first held-out rows, sources in turn, in micro-batches of the run's size.

    Raises `ConfigError` where there are too few.
    """
    size, length = config.train.micro_batch, config.train.sequence_length
    wanted = size * config.fidelity.num_batches
    sources = [validation_rows(dataset, name, length, wanted * length) for name in dataset.sources]
    places = [(row, source) for row in range(wanted) for source in sources]
    taken = [(row, source) for row, source in places if row < len(source.tokens_BT)][:wanted]
    if len(taken) < wanted:
        raise ConfigError(
            f"fidelity.num_batches={config.fidelity.num_batches} needs {wanted} rows of {length} "
            f"tokens, and {len(taken)} are held out; lower it, or hold more out "
            "(data.holdout_fraction, data.holdout_max_bytes)"
        )

    def stacked(name: str, start: int) -> Tensor:
        part = taken[start : start + size]
        return torch.stack([getattr(source, name)[row] for row, source in part]).to(device)

    fields = ("tokens_BT", "labels_BT", "seq_idx_BT")
    return [Rows(*(stacked(name, start) for name in fields)) for start in range(0, wanted, size)]


def _write(stem: Path, result: Mapping[str, Any]) -> None:
    """The result as .json, .csv and .png beside each other."""
    write_json(stem.with_suffix(".json"), result)
    with stem.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("recipe", "tensor", "gemm", "relative_error", "cosine"))
        writer.writerows(_csv_rows(result))
    draw_fidelity(result).savefig(stem.with_suffix(".png"), metadata=NO_METADATA)


def _csv_rows(result: Mapping[str, Any]) -> Iterator[tuple[str | float, ...]]:
    """Every linear's GEMMs alone; then every parameter's gradient of the whole backward pass."""
    for name, linear in result["linears"].items():
        for label, by_gemm in linear["gemms"].items():
            for gemm, distance in by_gemm.items():
                yield label, name, gemm, *distance.values()
    for name, by_recipe in result["parameters"].items():
        for label, distance in by_recipe.items():
            yield label, name, "end to end", *distance.values()
