"""What a study's runs left, as small CSV files beside each other: the report reads nothing else.

runs.csv    a row per run: arm, size, seed, fingerprints of its configuration and data, parameters,
            tokens, where it was forked, seconds, bytes of its checkpoint, held-out bits per byte by
            domain, accuracies by task
curves.csv  a row per run and bin of steps: mean training loss; and per validation: held-out loss
health.csv  a row per run, operand of a linear and statistic: its mean over time, and its last value
fidelity.csv  a row per checkpoint of the baseline, recipe, kind of linear and GEMM: relative error
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import ConfigError
from pipeline.curves import Curve, read_curves
from pipeline.data.shards import read_manifest
from pipeline.runs import RunFolder, write_whole
from pipeline.stages import dataset_folder
from pipeline.study.plan import StudyRun
from pipeline.train import checkpoint
from pipeline.train.schedule import Schedule

BINS = 200  # of a run's steps: enough for a curve, and few enough to commit
TRAIN, VALIDATION = "train/loss", "validation/loss_bf16"
FILES = ("runs.csv", "curves.csv", "health.csv", "fidelity.csv")


@dataclass(frozen=True)
class Row:
    """A run as the report knows it. `figures`: everything measured at its end, by name.

    configuration: `StudyRun.configuration`. data: the prepared corpus's content hash.
    """

    run: str
    arm: str
    size: str
    seed: int
    configuration: str
    data: str
    parameters: int
    tokens: int
    fork_tokens: int | None
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Tables:
    """A study's tables. `curves[run][name]`; `health` and `fidelity` rows are plain mappings."""

    rows: tuple[Row, ...]
    curves: Mapping[str, Mapping[str, Curve]]
    health: tuple[Mapping[str, Any], ...]
    fidelity: tuple[Mapping[str, Any], ...] = ()


def collect(runs: Sequence[StudyRun], root: Path) -> Tables:
    """Read what finished runs left in their folders."""
    rows, curves, health = list[Row](), dict[str, dict[str, Curve]](), list[dict[str, Any]]()
    for run in runs:
        folder = RunFolder(root / run.name)
        results = json.loads(folder.results.read_text())
        read = read_curves(folder.metrics)
        schedule = Schedule.of(run.config.train, tuple(run.config.data.sources))
        fork = run.fork * schedule.tokens_per_step if run.fork else None
        figures = _figures(results) | checkpoint_bytes(folder)
        tokens = schedule.num_steps * schedule.tokens_per_step
        data = read_manifest(dataset_folder(run.config, folder))["content_hash"]
        row = Row(
            run.name, run.arm, run.size, run.seed, run.configuration, data,
            results["parameters"], tokens, fork, figures,
        )  # fmt: skip
        rows.append(row)
        named = {name: read[name] for name in read if name in (TRAIN, VALIDATION)}
        edges = np.linspace(0, tokens, BINS + 1)
        curves[run.name] = named | {TRAIN: binned(read[TRAIN], edges)}
        health += _health(run, read)
    return Tables(tuple(rows), curves, tuple(health))


def checkpoint_bytes(run: RunFolder) -> dict[str, float]:
    """The size of a run's last checkpoint; nothing where none was kept."""
    steps = checkpoint.steps_in(run.checkpoints)
    if not steps:
        return {}
    files = (run.checkpoints / checkpoint.folder_name(steps[-1])).iterdir()
    return {"checkpoint_bytes": float(sum(file.stat().st_size for file in files))}


def binned(curve: Curve, edges: np.ndarray) -> Curve:
    """Means of a curve between the same edges for every run, so that bins can be paired.

    A bin stands at the last token of its steps; one without steps is left out.
    """
    place = np.searchsorted(edges, curve.tokens, side="left")
    kept = np.unique(place)
    values = [curve.values[place == bin].mean() for bin in kept]
    tokens = [curve.tokens[place == bin].max() for bin in kept]
    return Curve(np.array(tokens, float), np.array(values, float))


def _figures(results: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a run's end, by name: bits per byte, accuracies, seconds."""
    evaluation = results["eval"]
    figures = {
        f"bits_per_byte/{name}": float(domain["bits_per_byte"])
        for name, domain in evaluation["domains"].items()
    }
    for name, task in evaluation["tasks"].items():
        if "accuracy" in task:
            figures[f"accuracy/{name}"] = float(task["accuracy"])
    return figures | {"seconds": float(results["seconds"]["train"])}


def _health(run: StudyRun, curves: Mapping[str, Curve]) -> Iterable[dict[str, Any]]:
    """Means over time of what quantization did to each operand (quant/<layer>/<role>/<stat>)."""
    for name, curve in curves.items():
        if name.startswith("quant/"):
            layer, role, statistic = name.removeprefix("quant/").rsplit("/", 2)
            identity = {"run": run.name, "arm": run.arm, "size": run.size, "seed": run.seed}
            yield identity | {
                "layer": layer,
                "role": role,
                "statistic": statistic,
                "mean": float(f"{np.mean(curve.values):.4g}"),
                "last": float(f"{curve.last:.4g}"),
            }


def write(tables: Tables, folder: Path) -> None:
    """The four files. The same tables give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [
        {**asdict(row), "figures": json.dumps(dict(sorted(row.figures.items())))}
        for row in tables.rows
    ]
    _write(folder / "runs.csv", runs)
    points = [
        {"run": run, "name": name, "tokens": int(tokens), "value": f"{value:.7g}"}
        for run, named in tables.curves.items()
        for name, curve in named.items()
        for tokens, value in zip(curve.tokens, curve.values, strict=True)
    ]
    _write(folder / "curves.csv", points)
    _write(folder / "health.csv", list(tables.health))
    _write(folder / "fidelity.csv", list(tables.fidelity))


def read(folder: Path) -> Tables:
    """The tables that `write` left. Raises `ConfigError`."""
    try:
        return _read_all(folder)
    except (FileNotFoundError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{folder}: no tables of a study as this version writes them "
            f"({type(error).__name__}: {error})"
        ) from error


def _read_all(folder: Path) -> Tables:
    rows = [
        Row(
            run=each["run"],
            arm=each["arm"],
            size=each["size"],
            seed=int(each["seed"]),
            configuration=each["configuration"],
            data=each["data"],
            parameters=int(each["parameters"]),
            tokens=int(each["tokens"]),
            fork_tokens=int(each["fork_tokens"]) if each["fork_tokens"] else None,
            figures=json.loads(each["figures"]),
        )
        for each in _read(folder / "runs.csv")
    ]
    points: dict[str, dict[str, list[tuple[float, float]]]] = {row.run: {} for row in rows}
    for each in _read(folder / "curves.csv"):
        named = points[each["run"]].setdefault(each["name"], [])
        named.append((float(each["tokens"]), float(each["value"])))
    curves = {
        run: {name: Curve(*np.array(pairs).T) for name, pairs in named.items()}
        for run, named in points.items()
    }
    health = [
        {
            **each,
            "seed": int(each["seed"]),
            "mean": float(each["mean"]),
            "last": float(each["last"]),
        }
        for each in _read(folder / "health.csv")
    ]
    fidelity = [
        {**each, "tokens": int(each["tokens"]), "relative_error": float(each["relative_error"])}
        for each in _read(folder / "fidelity.csv")
    ]
    return Tables(tuple(rows), curves, tuple(health), tuple(fidelity))


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    write_whole(path, text.getvalue())


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
