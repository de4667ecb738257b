"""Scores side by side: this model, others that were evaluated here, and the paper's 12B."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.runs import RunFolder

SUITE = Path(__file__).resolve().parents[2] / "conf" / "evals" / "paper.yaml"


def paper_scores() -> dict[str, dict[str, Any]]:
    """What arXiv 2509.25149 reports for its 12B, by task: label, FP8 and NVFP4 in percent."""
    details = yaml.safe_load(SUITE.read_text())["details"]
    return {
        name: {
            "label": task["label"], "fp8": task["paper_fp8"], "nvfp4": task["paper_nvfp4"],
        }
        for name, task in details.items()
    }  # fmt: skip


def paper_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each task of the paper that was evaluated: ours beside the paper's columns."""
    tasks = results.get("tasks", {})
    return [
        {"label": paper["label"], "ours": 100 * tasks[name]["score"], **tasks[name], **paper}
        for name, paper in paper_scores().items()
        if name in tasks
    ]


def results_of(run: RunFolder) -> Sequence[dict[str, Any]]:
    """The results of every evaluated checkpoint of a run, by step."""
    found = [json.loads(path.read_text()) for path in run.evals.glob("step-*/results.json")]
    return sorted((each for each in found if "tokens" in each), key=lambda each: each["step"])


def others(root: Path) -> dict[str, dict[str, Any]]:
    """The results of every model folder that was evaluated below this root, by name; by its whole
    path where several have one name, as exports of the same step do."""
    read = [json.loads(p.read_text()) for p in sorted((root / "evals").glob("*/results.json"))]
    named = [results for results in read if "name" in results]
    times = Counter(results["name"] for results in named)
    return {
        results["name"] if times[results["name"]] == 1 else results["folder"]: results
        for results in named
    }


def score_table(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines: a task each, a column for each model, with standard errors."""
    names = list(dict.fromkeys(n for results in models.values() for n in results["tasks"]))
    rows = [["task", "metric", "questions", *models]]
    for name in names:
        tasks = [results["tasks"].get(name) for results in models.values()]
        known = next(task for task in tasks if task)
        cells = [_cell(task) for task in tasks]
        rows.append([name, known["metric"], str(known["num_samples"]), *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _cell(task: Mapping[str, Any] | None) -> str:
    if task is None:
        return "-"
    scale = 1 if "perplex" in task["metric"] else 100
    error = f" ± {scale * task['standard_error']:.1f}" if task["standard_error"] else ""
    return f"{scale * task['score']:.1f}{error}"
