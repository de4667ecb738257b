"""The report renders from whatever a run has got to, and needs nothing from outside itself."""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import report
from pipeline.curves import Curve, read_curves
from pipeline.lineage import Lineage, write_lineage
from pipeline.report import amount, duration, write_report
from pipeline.runs import RunFolder

STEPS = 60
TOKENS = 50_000  # a step


def record(kind: str, step: int, **metrics: float) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {"kind": kind, "step": step, "tokens": step * TOKENS, "time": 0.0, "metrics": named}


def metrics() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    lines = []
    for step in range(1, STEPS + 1):
        loss = 3.6 + 4.7 * math.exp(-step / 11) + 0.08 * rng.normal()
        rate = 3e-3 * min(1, step / 8) * (1 if step < 42 else (STEPS - step) / 18)
        norm = 0.4 + 2 * math.exp(-step / 10) + 0.05 * abs(rng.normal())
        lines.append(
            record(
                "train", step, train__loss=loss, train__learning_rate=rate, train__grad_norm=norm
            )
        )
        if step % 10 == 0:
            values = {"validation/loss_bf16": loss + 0.05, "validation/loss_recipe": loss + 0.08}
            for i, domain in enumerate(("code", "prose", "mathematics")):
                values[f"validation/{domain}/loss_bf16"] = loss + 0.4 - 0.4 * i
            lines.append(record("validation", step) | {"metrics": values})
        if step % 15 == 0:
            values = {}
            for layer in ("blocks.1.ffn.up", "blocks.2.mamba.out"):
                for i, role in enumerate(("input", "weight", "dgrad_gradient")):
                    values[f"quant/{layer}/{role}/error"] = 0.09 + 0.01 * i + 0.004 * rng.random()
                    values[f"quant/{layer}/{role}/flushed"] = 0.03 + 0.02 * i + 0.01 * rng.random()
            lines.append(record("statistics", step) | {"metrics": values})
    return lines


def results() -> dict[str, Any]:
    baselines = {"bigram": 2.1, "unigram": 3.3, "untrained": 4.6}
    domain = {f"{name}_bits_per_byte": value for name, value in baselines.items()}
    task = {
        "label": "continuation", "metric": "acc_mutual_info", "score": 0.52, "accuracy": 0.52,
        "standard_error": 0.029, "num_samples": 300,
    }  # fmt: skip
    linear = {"fprop": "nvfp4", "dgrad": "nvfp4", "wgrad": "nvfp4", "backend": "emulated"}
    return {
        "run_id": "r",
        "status": "finished",
        "experiment": "tiny hybrid in NVFP4",
        "precision": "nvfp4",
        "fingerprint": "0123456789abcdef0123",
        "parameters": 2_034_560,
        "seconds": {"prepare": 11.2, "train": 151.0, "eval": 21.7},
        "recipe": {"name": "nvfp4", "rules": [["*.ffn.*", "nvfp4"]]},
        "precision_table": [
            {"name": "blocks.1.ffn.up", **linear},
            {"name": "blocks.2.mamba.out", **linear},
            {"name": "head", "fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16", "backend": "cpu"},
        ],
        "train": {
            "steps": STEPS,
            "tokens": STEPS * TOKENS,
            "tokens_per_second": 19_870.0,
            "final_loss": 3.612,
            "skipped_steps": 1,
            "validation": {"recipe": 3.7123, "bf16": 3.68},
            "phases": [
                {
                    "name": "phase 1",
                    "start_tokens": 0,
                    "start_step": 0,
                    "blend": {"code": 0.5, "prose": 0.5},
                    "precision": "recipe",
                    "learning_rate": "stable",
                },
                {
                    "name": "phase 2",
                    "start_tokens": 42 * TOKENS,
                    "start_step": 42,
                    "blend": {"prose": 1.0},
                    "precision": "recipe",
                    "learning_rate": "decay",
                },
            ],
        },
        "eval": {
            "step": STEPS,
            "precision": "bf16",
            "domains": {
                "code": {
                    "bits_per_byte": 1.4,
                    "loss": 3.7,
                    "tokens": 5,
                    "bytes": 150_000,
                    **domain,
                },
                "prose": {
                    "bits_per_byte": 1.8,
                    "loss": 4.1,
                    "tokens": 5,
                    "bytes": 50_000,
                    **domain,
                },
            },
            "tasks": {
                "continuation": {
                    **task,
                    "accuracy_norm": 0.53,
                    "chance": 0.25,
                    "num_fewshot": 0,
                    "version": 1.0,
                    "per_domain": {
                        "code": {"accuracy": 0.44, "standard_error": 0.05, "num_samples": 150},
                        "prose": {"accuracy": 0.6, "standard_error": 0.05, "num_samples": 150},
                    },
                }
            },
        },
    }


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that got to its end, with its report: to look at, not to change."""
    run = make_run(tmp_path_factory.mktemp("runs"))
    write_report(run)
    return run


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves the seconds that drawing takes where only the text matters."""
    monkeypatch.setattr(report, "draw_all", lambda curves, results: {})


def make_run(folder: Path) -> RunFolder:
    run = RunFolder(folder / "20260131-120000-nvfp4-1a2b")
    run.path.mkdir()
    run.config.write_text("model:\n  pattern: M-M*-\n")
    run.results.write_text(json.dumps(results()))
    write_metrics(run, metrics())
    return run


def write_metrics(run: RunFolder, lines: list[dict[str, Any]]) -> None:
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def html_of(run: RunFolder) -> str:
    path = write_report(run)
    assert path == run.report
    return path.read_text(encoding="utf-8")


def text_of(html: str) -> str:
    """What a reader sees, in one line."""
    without = re.sub(r"<style>.*?</style>|<[^>]*>", " ", html, flags=re.DOTALL)
    return " ".join(without.split())


def child_of(parent: RunFolder, name: str, step: int) -> RunFolder:
    """A run that left `parent` at a step and trained 10 steps from there."""
    run = RunFolder(parent.path.parent / name)
    run.path.mkdir()
    run.config.write_text("model:\n  pattern: M-M*-\n")
    change_in_it = ("train.learning_rate (0.003 then, 0.001 now)",)
    write_lineage(run, Lineage(parent.id, step, step * TOKENS, "", change_in_it, (), ""))
    write_metrics(run, [record("train", step + i, train__loss=3.0) for i in range(1, 11)])
    return run


def change(run: RunFolder, **entries: Any) -> None:
    """Replace entries of the results; None removes one."""
    merged = results() | entries
    kept = {key: value for key, value in merged.items() if value is not None}
    run.results.write_text(json.dumps(kept))


def test_headline_numbers_stand_in_the_text(whole: RunFolder) -> None:
    text = text_of(whole.report.read_text())
    assert "3.712 nats per token" in text
    assert "+0.88% from the precision itself" in text  # 3.7123 / 3.68
    assert "1.500 bits per byte" in text  # (1.4 * 150,000 + 1.8 * 50,000) / 200,000
    assert "52.0 ± 2.9 % right" in text
    assert "guessing gives 25%" in text
    assert "3 million tokens" in text
    assert "1 step was skipped" in text
    assert "2.03 million parameters" in text


def test_every_section_and_figure_of_a_whole_run_is_there(whole: RunFolder) -> None:
    html = whole.report.read_text()
    assert re.findall(r"<h2>(.*?)</h2>", html) == [
        "Training",
        "Evaluation",
        "Precision",
        "Time",
        "Configuration",
    ]
    names = ["continuation", "domains", "loss", "quantization", "schedule", "validation"]
    assert sorted(path.stem for path in whole.figures.iterdir()) == names
    assert html.count("<img") == len(names)
    assert "pattern: M-M*-" in html
    assert "2 min 31 s" in html


def test_figures_are_embedded_whole(whole: RunFolder) -> None:
    html = whole.report.read_text()
    embedded = [base64.b64decode(image) for image in re.findall(r"base64,([^\"]+)", html)]
    files = sorted(path.read_bytes() for path in whole.figures.iterdir())
    assert sorted(embedded) == files
    assert all(image.startswith(b"\x89PNG") for image in embedded)


def test_nothing_is_loaded_from_elsewhere(whole: RunFolder) -> None:
    html = re.sub(r"base64,[^\"]+", "", whole.report.read_text())
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link|url\(", html)
    assert set(re.findall(r'src="([a-z]+):', html)) == {"data"}


@pytest.mark.usefixtures("without_figures")
def test_text_from_the_run_is_escaped(run: RunFolder) -> None:
    change(run, experiment="<script>alert(1)</script>")
    run.config.write_text("name: <b>&</b>\n")
    html = html_of(run)
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "name: &lt;b&gt;&amp;&lt;/b&gt;" in html


def test_a_run_that_was_not_evaluated_says_so(run: RunFolder) -> None:
    change(run, eval=None)
    html = html_of(run)
    assert "No evaluation: the run has no evaluated checkpoint yet." in text_of(html)
    assert "Compression" not in html
    assert not (run.figures / "domains.png").exists()


@pytest.mark.usefixtures("without_figures")
def test_tasks_may_be_left_out_of_an_evaluation(run: RunFolder) -> None:
    change(run, eval={"domains": results()["eval"]["domains"], "tasks": {}})
    text = text_of(html_of(run))
    assert "bits per byte" in text
    assert "standard error" not in text


@pytest.mark.usefixtures("without_figures")
def test_a_task_without_chance_or_error_is_shown_with_a_dash(run: RunFolder) -> None:
    task = {"num_samples": 10, "accuracy": 0.5, "metrics": {}}
    change(run, eval={"domains": results()["eval"]["domains"], "tasks": {"other": task}})
    assert "other acc 50.0% - - 10" in text_of(html_of(run)).replace("\N{EN DASH}", "-")


PIQA = {
    "label": "PIQA", "metric": "acc_norm", "score": 0.611, "standard_error": 0.01, "chance": 0.5,
    "num_samples": 1838, "num_fewshot": 0, "version": 1.0,
}  # fmt: skip


@pytest.mark.usefixtures("without_figures")
def test_the_papers_columns_and_other_models_stand_beside_the_runs_scores(run: RunFolder) -> None:
    domains = results()["eval"]["domains"]
    change(run, eval={"domains": domains, "tasks": {"piqa": PIQA}, "skipped": {"mmlu": "no hub"}})
    other = run.path.parent / "evals" / "theirs-1"
    other.mkdir(parents=True)
    theirs = {"name": "theirs", "tasks": {"piqa": PIQA | {"score": 0.7}}}
    (other / "results.json").write_text(json.dumps(theirs))
    text = text_of(html_of(run))
    assert "PIQA acc_norm 61.1% 1.0% 50.0% 70.0% 1838 0 1.0" in text
    assert "PIQA 61.10 82.64 82.70" in text
    assert "Left out: mmlu (no hub)." in text


def test_scores_are_drawn_against_tokens_once_two_checkpoints_have_some(run: RunFolder) -> None:
    for step in (10, 20):
        folder = run.evals / f"step-{step:08d}"
        folder.mkdir(parents=True)
        record = {"step": step, "tokens": step * 100, "tasks": {"piqa": PIQA}}
        (folder / "results.json").write_text(json.dumps(record))
        html_of(run)
        assert (run.figures / "scores.png").is_file() == (step == 20)


def test_a_run_that_has_not_trained_says_so(run: RunFolder) -> None:
    run.metrics.unlink()
    change(run, train=None, eval=None)
    text = text_of(html_of(run))
    assert "No training metrics: the run has not trained yet." in text
    assert list(run.figures.iterdir()) == []


def test_an_empty_folder_still_gives_a_report(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "empty")
    run.path.mkdir()
    text = text_of(html_of(run))
    assert "Run empty" in text
    assert "No configuration was found" in text


def test_a_family_is_drawn_as_one_tree_in_the_report_of_each_member(run: RunFolder) -> None:
    child = child_of(run, "child", 40)
    for member in (run, child):
        text = text_of(html_of(member))
        assert "child 20260131-120000-nvfp4-1a2b 40 train.learning_rate (0.003 then" in text
        assert (member.figures / "family.png").exists()


def test_a_run_without_relatives_has_no_family(run: RunFolder) -> None:
    html = html_of(run)
    assert "<h2>Family</h2>" not in html
    assert not (run.figures / "family.png").exists()


def test_a_relative_that_has_not_trained_is_listed_and_not_drawn(run: RunFolder) -> None:
    child_of(run, "child", 40).metrics.unlink()
    assert "child 20260131-120000-nvfp4-1a2b 40" in text_of(html_of(run))
    assert not (run.figures / "family.png").exists()


@pytest.mark.usefixtures("without_figures")
def test_a_report_is_replaced_by_a_later_one(run: RunFolder) -> None:
    write_report(run)
    change(run, status="failed")
    assert "failed" in html_of(run)
    assert not list(run.path.glob("*.tmp"))


def test_the_same_numbers_give_the_same_report(run: RunFolder) -> None:
    assert html_of(run) == html_of(run)


def test_the_last_of_a_replayed_step_counts_and_a_torn_line_does_not(run: RunFolder) -> None:
    write_metrics(
        run,
        [
            record("train", 1, train__loss=5.0),
            record("train", 2, train__loss=99.0),
            record("validation", 2, validation__loss_bf16=4.5),
            record("train", 2, train__loss=4.0),
        ],
    )
    with run.metrics.open("a") as file:
        file.write('{"kind": "train", "step": 3, "tok')
    curves = read_curves(run.metrics)
    assert curves["train/loss"].values.tolist() == [5.0, 4.0]
    assert curves["train/loss"].tokens.tolist() == [TOKENS, 2 * TOKENS]
    assert curves["validation/loss_bf16"].last == 4.5


def test_losses_that_are_not_finite_do_not_stop_the_report(run: RunFolder) -> None:
    write_metrics(run, [record("train", i, train__loss=float("nan")) for i in (1, 2)])
    write_report(run)
    assert (run.figures / "loss.png").exists()


def test_smoothing_is_a_running_median() -> None:
    values = np.full(100, 2.0)
    values[50] = 1000.0
    curve = Curve(np.arange(100.0), values)
    assert curve.smooth().values.tolist() == [2.0] * 100


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (19_870, "19,870"),
        (150_000, "150 thousand"),
        (3_000_000, "3 million"),
        (1e13, "10 trillion"),
    ],
)
def test_amounts(number: float, text: str) -> None:
    assert amount(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.27, "4.3 s"), (83, "1 min 23 s"), (59.99, "60.0 s"), (7380, "2 h 3 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
