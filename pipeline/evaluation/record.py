"""Evaluations in MLflow: metrics by step and by tokens, a table, samples, all at the checkpoint's
logged model. Sending twice stores once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evals.harness import read_samples
from pipeline.config import Config, flatten
from pipeline.tracking import BATCH, TrackingError, connect, experiment_id, first_line, tracking_uri

COLUMNS = (
    "label", "metric", "score", "standard_error", "chance", "num_samples", "num_fewshot", "version",
)  # fmt: skip
LONGEST = 2000  # characters of a prompt that a table shows


class Recorder:
    """Sends evaluations to one MLflow run."""

    def __init__(self, config: Config, root: Path, run_id: str) -> None:
        self.config, self.root, self.run_id = config, root, run_id
        self.client = connect(tracking_uri(config.tracking, root))

    @classmethod
    def of_folder(cls, config: Config, root: Path, label: str, folder: str) -> Recorder:
        """A run of its own for a model that no run of ours made; found again by its name."""
        recorder = cls(config, root, "")
        try:
            experiment = experiment_id(recorder.client, config.tracking, root)
            found = recorder.client.search_runs(
                [experiment], f"attributes.run_name = '{label}'", max_results=1
            )
            run = (
                found[0]
                if found
                else recorder.client.create_run(experiment, run_name=label, tags={"folder": folder})
            )
            if not found:
                recorder.client.set_terminated(run.info.run_id)
        except Exception as error:
            raise TrackingError(first_line(error)) from error
        recorder.run_id = run.info.run_id
        return recorder

    def record(
        self, results: Mapping[str, Any], folder: Path, made_by: tuple[str, Path] | None
    ) -> None:
        """Send one evaluation.

        made_by: the run's name and the checkpoint's folder. Raises `TrackingError`.
        """
        try:
            model = self._logged_model(*made_by, results["step"]) if made_by else None
            self._metrics(results, folder, model)
            place = f"evals/step-{results['step']}" if made_by else "evals"
            self._tables(results, folder, place)
            self.client.log_artifact(self.run_id, str(folder / "results.json"), place)
        except Exception as error:  # MLflow raises a different class for each kind of store
            raise TrackingError(first_line(error)) from error

    def _metrics(self, results: Mapping[str, Any], folder: Path, model: str | None) -> None:
        from mlflow.entities import Metric

        milliseconds = int((folder / "results.json").stat().st_mtime * 1000)
        step, tokens = results.get("step", 0), results.get("tokens", 0)
        numbers = {
            f"eval/{name}": float(value)
            for name, value in flatten(
                {key: results[key] for key in ("domains", "tasks")}, "/"
            ).items()
            if isinstance(value, int | float)
        }
        metrics = [
            Metric(_name(prefix + name), value, milliseconds, at, model_id=model)
            for name, value in numbers.items()
            for prefix, at in (("", step), ("by_tokens/", tokens))
        ]
        for start in range(0, len(metrics), BATCH):
            self.client.log_batch(self.run_id, metrics[start : start + BATCH])

    def _tables(self, results: Mapping[str, Any], folder: Path, place: str) -> None:
        """The table of scores, and the first samples of each task, as MLflow's tables."""
        tasks = results["tasks"]
        if not tasks:
            return
        table: dict[str, list[Any]] = {"task": list(tasks)}
        for column in COLUMNS:
            table[column] = [task.get(column) for task in tasks.values()]
        self._table(table, f"{place}/scores.json")
        for name in tasks:
            path = folder / f"{name}_samples.jsonl"
            if not path.is_file() or not self.config.evals.samples_logged:
                continue
            samples = read_samples(path)[: self.config.evals.samples_logged]
            self._table(
                {
                    "prompt": [sample["prompt"][-LONGEST:] for sample in samples],
                    "choices": [str(sample["continuations"])[:LONGEST] for sample in samples],
                    "responses": [str(sample["scores"])[:LONGEST] for sample in samples],
                    "answer": [str(sample["target"])[:LONGEST] for sample in samples],
                    "score": [str(sample["metrics"]) for sample in samples],
                },
                f"{place}/samples/{name}.json",
            )

    def _table(self, columns: dict[str, list[Any]], file: str) -> None:
        """A table artifact, in the place of the one of that name: MLflow would append."""
        import json

        names = list(columns)
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        text = json.dumps({"columns": names, "data": rows})
        self.client.log_text(self.run_id, text, file)
        tag = "mlflow.loggedArtifacts"
        logged = json.loads(self.client.get_run(self.run_id).data.tags.get(tag, "[]"))
        entry = {"path": file, "type": "table"}
        if entry not in logged:
            self.client.set_tag(self.run_id, tag, json.dumps([*logged, entry]))

    def _logged_model(self, run_name: str, path: Path, step: int) -> str:
        """The id of the checkpoint's logged model, made where there is none yet."""
        import mlflow

        experiment = self.client.get_run(self.run_id).info.experiment_id
        name = f"{run_name}-step-{step}"
        found = self.client.search_logged_models([experiment], filter_string=f"name = '{name}'")
        if found:
            return str(found[0].model_id)
        mlflow.set_tracking_uri(tracking_uri(self.config.tracking, self.root))
        model = mlflow.create_external_model(
            name=name,
            source_run_id=self.run_id,
            experiment_id=experiment,
            params={"step": str(step)},
            tags={"uri": str(path)},
            model_type="checkpoint",
        )
        return str(model.model_id)


def _name(name: str) -> str:
    """A metric's name in the letters that MLflow takes."""
    return "".join(c if c.isalnum() or c in "_-.:/ " else "_" for c in name)
