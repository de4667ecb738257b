"""The stages of a run: their order, what each takes and leaves, and what a run ends with.

Every stage reads what stands already, writes its own output, and leaves a manifest
`stages/<name>.json` when it is done. `results.json` grows with them: it holds every figure of the
report.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config import Config, ConfigError
from pipeline.goodput import goodput
from pipeline.runs import RunFolder, root_folder, write_whole
from pipeline.tracking import Tracker, TrackingError
from pipeline.train.metrics import MetricsFile, final_records, read_records


def run_stages(
    config: Config, run: RunFolder, tracker: Tracker, stages: tuple[str, ...], *, again: bool
) -> None:
    """Run the named stages in order, each timed and announced.

    again: whether a stage that this run has finished is done once more; else it is left alone.
    """
    functions: dict[str, Callable[[Config, RunFolder, Tracker], dict[str, Any]]] = {
        "prepare": prepare,
        "train": train,
        "eval": evaluate,
        "report": report,
    }
    for name in stages:
        if (run.stages / f"{name}.json").is_file() and not again:
            print(f"\n[{name}] done already", flush=True)
            continue
        print(f"\n[{name}] {DESCRIPTIONS[name]}", flush=True)
        started = time.perf_counter()
        summary = functions[name](config, run, tracker)
        seconds = round(time.perf_counter() - started, 2)
        write_json(run.stages / f"{name}.json", {"seconds": seconds, "output": summary})
        update_results(run, {"seconds": {name: seconds}})
        print(f"[{name}] done in {seconds:.1f} s", flush=True)


VERIFY_BYTES = 4_000_000_000  # corpora up to this size are read through before training
DESCRIPTIONS = {
    "prepare": "tokenize and pack the corpus",
    "train": "train the model",
    "eval": "measure the last checkpoint on held-out text",
    "report": "draw the curves and write the report",
}


def prepare(config: Config, run: RunFolder, tracker: Tracker) -> dict[str, Any]:
    """Prepare the corpus, or find it prepared. Leaves its folder, and what it counted."""
    from pipeline.data import summary
    from pipeline.data.prepare import prepare as prepare_corpus
    from pipeline.data.shards import read_manifest

    folder = prepare_corpus(config.data, root_folder(config), address=config.cluster.address)
    manifest = read_manifest(folder)
    update_results(run, {"data": summary.counts_of(manifest)})
    metrics = MetricsFile(run.metrics)
    metrics.append("prepare", 0, 0, summary.metrics(manifest))
    metrics.close()
    tracker_safely(tracker.ship)
    return {"dataset": str(folder)}


def train(config: Config, run: RunFolder, tracker: Tracker) -> dict[str, Any]:
    """Train to the end of the schedule; a run that was interrupted goes on."""
    from pipeline.data.shards import open_corpus, verify
    from pipeline.follow import Follower
    from pipeline.lineage import schedule_of
    from pipeline.train import checkpoint
    from pipeline.train.driver import train_on_workers
    from pipeline.warm_start import warm_start_of

    folder = dataset_folder(config, run)
    dataset = open_corpus(config.data, folder)
    if dataset.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the tokenizer's "
            f"{dataset.vocab_size}"
        )
    own_shards = config.data.on_corrupt == "stop" and not config.data.shards_uri
    verify(dataset, deep=_size(folder) < VERIFY_BYTES, check_shards=own_shards)
    schedule = schedule_of(config, run)
    overview = describe_training(config, dataset, schedule)
    update_results(run, overview["results"])
    print("\n".join(overview["lines"]), flush=True)
    if source := warm_start_of(run):
        print(f"  weights    from {source.path}", flush=True)
    with Follower(run, tracker, schedule):
        summary = train_on_workers(config, run, folder)
    if run.profile.is_dir():
        tracker_safely(lambda: tracker.log_files(run.profile))
    found = checkpoint.latest(run.checkpoints)
    assert found is not None, "training ends with a checkpoint"
    tracker_safely(lambda: tracker.log_checkpoint(found.path, found.step))
    summary |= curve_summary(run, schedule.tokens_per_step)
    update_results(run, {"train": {**summary, "phases": schedule.describe()}})
    return {"checkpoint": str(found.path), **summary}


def curve_summary(run: RunFolder, tokens_per_step: int) -> dict[str, float]:
    """Last loss, mean speed of the logged steps and goodput, of all sittings that a run took."""
    steps = [r["metrics"] for r in final_records(run.metrics) if r["kind"] == "train"]
    seconds = sum(tokens_per_step / step["train/tokens_per_second"] for step in steps)
    found = goodput([record for record, _ in read_records(run.metrics)], tokens_per_step)
    return {
        "final_loss": steps[-1]["train/loss"],
        "tokens_per_second": len(steps) * tokens_per_step / seconds,
        **({f"goodput_{k}": v for k, v in dataclasses.asdict(found).items()} if found else {}),
    }


def describe_training(config: Config, dataset: Any, schedule: Any) -> dict[str, Any]:
    """What will be trained and in which precision: lines to print, and entries of the results."""
    import torch

    from model.backends import paths
    from pipeline.train import exclusions
    from pipeline.train.build import build_mixture, build_model, build_recipe, compute_dtype
    from quant import apply_recipe
    from quant.policy import summary

    build_mixture(config, schedule, dataset)  # a blend that cannot be had stops here
    exclusions.check(config.data, dataset.shard_names, schedule.num_steps)
    device = torch.device("cuda" if config.cluster.gpus_per_worker else "cpu")
    here = device.type == "cpu" or torch.cuda.is_available()
    with torch.device("meta"):
        model = build_model(config, torch.device("meta"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    recipe = build_recipe(config)
    blocks = len(config.model.pattern)
    precision = apply_recipe(model, recipe, num_blocks=blocks, seed=config.seed)
    tokens = config.train.micro_batch * config.train.sequence_length
    table = precision.table(device if here else torch.device("cpu"), tokens)
    if not here:  # a head node without a GPU
        table = [dataclasses.replace(row, backend="chosen by the workers") for row in table]
    lines = [
        f"  model      {config.model.pattern}, {parameters:,} parameters",
        f"  precision  {config.precision.recipe}: {summary(table)}",
        f"  schedule   {schedule.num_steps} steps of {schedule.tokens_per_step:,} tokens, "
        f"{len(schedule.phases)} phases",
    ]
    kinds_of_block = paths(model.config, device, compute_dtype(device))
    how = ", compiled" if config.train.compile else ""
    lines += [f"  {kind:<9}  {path}{how}" for kind, path in kinds_of_block.items()]
    results = {
        "parameters": parameters,
        "precision_table": [dataclasses.asdict(row) for row in table],
        "recipe": recipe.to_dict(),
    }
    return {"lines": lines, "results": results}


def evaluate(config: Config, run: RunFolder, tracker: Tracker) -> dict[str, Any]:
    """Evaluate the checkpoints that `step` names, the newest complete one by default."""
    from pipeline.evaluation.command import evaluate_run

    results = evaluate_run(config, run, dataset_folder(config, run), tracker.mlflow_run_id)
    update_results(run, {"eval": results})
    return {"step": results["step"], "skipped": results["skipped"]}


def report(config: Config, run: RunFolder, tracker: Tracker) -> dict[str, Any]:
    """Write figures and the HTML report from the run's files alone."""
    from pipeline.report import write_report

    path = write_report(run)
    tracker_safely(lambda: tracker.log_files(path, run.figures, run.results))
    return {"report": str(path)}


def dataset_folder(config: Config, run: RunFolder) -> Path:
    """The prepared corpus of a run: as its prepare stage left it, or found (and made) now."""
    manifest = run.stages / "prepare.json"
    if manifest.is_file():
        return Path(json.loads(manifest.read_text())["output"]["dataset"])
    from pipeline.data.prepare import prepare as prepare_corpus

    return prepare_corpus(config.data, root_folder(config), address=config.cluster.address)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def update_results(run: RunFolder, entries: dict[str, Any]) -> None:
    """Put entries into `results.json`; the seconds of stages are added to those that stand."""
    results = json.loads(run.results.read_text()) if run.results.is_file() else {}
    for key, value in entries.items():
        mergeable = key == "seconds" and isinstance(results.get(key), dict)
        results[key] = {**results[key], **value} if mergeable else value
    write_json(run.results, results)


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=1))


def tracker_safely(call: Callable[[], None]) -> None:
    """A store that went away never stops a run: say so and go on."""
    try:
        call()
    except TrackingError as error:
        print(f"  tracking store unreachable, results are kept on disk: {error}", flush=True)
