"""The report: one HTML file that needs nothing else, written from a run's files alone.

Reads the configuration, `results.json` and the metrics; what a run has not got to is left out,
with a sentence. Figures are written as PNG files too.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from pipeline.curves import Branch, read_curves
from pipeline.evaluation.tables import others, paper_rows, results_of
from pipeline.figures import draw_all, draw_family, draw_scores
from pipeline.lineage import family
from pipeline.runs import RunFolder, write_whole

TEMPLATE = "report.html.j2"
NO_METADATA = {"Software": None}  # the same numbers give the same file


def write_report(run: RunFolder) -> Path:
    """Write the figures and the report of a run, however far it got; returns the report's path."""
    results = json.loads(run.results.read_text()) if run.results.is_file() else {}
    curves = read_curves(run.metrics)
    branches = _branches(run)
    figures = draw_all(curves, results)
    if sum(branch.loss is not None for branch in branches) > 1:
        figures["family"] = draw_family(branches, run.id)
    if scores := draw_scores(results_of(run)):
        figures["scores"] = scores
    images = save_figures(figures, run.figures)
    html = (
        environment()
        .get_template(TEMPLATE)
        .render(
            run_id=run.id,
            results=results,
            domains=results.get("eval", {}).get("domains", {}),
            tasks=_tasks(results),
            skipped=results.get("eval", {}).get("skipped", {}),
            paper=paper_rows(results.get("eval", {})),
            others=others(run.path.parent),
            overall=_overall(results),
            precision=_precision_summary(results),
            seconds=results.get("seconds", {}),
            images=images,
            branches=branches,
            config=run.config.read_text() if run.config.is_file() else "",
            recipe=yaml.safe_dump(results["recipe"], sort_keys=False)
            if "recipe" in results
            else "",
        )
    )
    write_whole(run.report, html)
    return run.report


def save_figures(figures: Mapping[str, Figure], folder: Path) -> dict[str, str]:
    """Write figures as PNG; each in base64, as a page embeds it."""
    folder.mkdir(parents=True, exist_ok=True)
    images = {}
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, metadata=NO_METADATA)
        images[name] = base64.b64encode(path.read_bytes()).decode()
    return images


def _branches(run: RunFolder) -> list[Branch]:
    """The run and its relatives, parents before children; none where it has no relatives."""
    members = family(run) if run.config.is_file() else []
    if len(members) < 2:
        return []
    return [
        Branch(
            member.id,
            read_curves(member.metrics).get("train/loss"),
            *(
                (lineage.parent, lineage.step, lineage.tokens, lineage.difference)
                if lineage
                else ()
            ),
        )
        for member, lineage in members
    ]


def _tasks(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each task's results; what an earlier version left out stands as a dash."""
    unknown = dict.fromkeys(("standard_error", "chance")) | {"metric": "acc"}
    unknown |= dict.fromkeys(("num_fewshot", "version"), "\N{EN DASH}")
    return {
        name: unknown | {"label": name, "score": task.get("accuracy")} | task
        for name, task in results.get("eval", {}).get("tasks", {}).items()
    }


def _overall(results: Mapping[str, Any]) -> dict[str, float]:
    """Bits per byte over all domains together, of the model and of each baseline."""
    domains = results.get("eval", {}).get("domains", {}).values()
    num_bytes = sum(domain["bytes"] for domain in domains)
    return {
        kind or "model": sum(
            domain[f"{kind}_bits_per_byte" if kind else "bits_per_byte"] * domain["bytes"]
            for domain in domains
        )
        / num_bytes
        for kind in ("", "bigram", "unigram", "untrained")
        if domains
    }


def _precision_summary(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How many linears share each combination of precisions, the most first."""
    columns = ("fprop", "dgrad", "wgrad", "backend")
    table = results.get("precision_table", [])
    counts = Counter(tuple(row[column] for column in columns) for row in table)
    return [
        {"count": count} | dict(zip(columns, combination, strict=True))
        for combination, count in counts.most_common()
    ]


def environment() -> Environment:
    """Jinja's environment of all reports."""
    made = Environment(
        loader=PackageLoader("pipeline"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"amount": amount, "duration": duration}
    return made


def amount(number: float) -> str:
    """1234567 -> '1.23 million'; whole below 100,000."""
    for name, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if abs(number) >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,.0f}" if abs(number) < 1e5 else f"{number / 1e3:.3g} thousand"


def duration(seconds: float) -> str:
    """4.27 -> '4.3 s', 83 -> '1 min 23 s', 7380 -> '2 h 3 min'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
