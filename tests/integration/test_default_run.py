"""The default run, shortened: what it leaves, a kill and a resume, and the eval stage alone."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from pipeline.train import checkpoint
from pipeline.train.metrics import final_records
from tests.integration.runs import SHORT, Run, pipeline, run_folder, start_and_kill

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def weights(folder: Path) -> dict[str, bytes]:
    found = checkpoint.latest(folder / "checkpoints")
    assert found is not None
    return {
        f"{group}/{name}": tensor.numpy().tobytes()
        for group in ("model", "optimizer")
        for name, tensor in found.tensors(group).items()
    }


def losses(folder: Path) -> list[tuple[int, float]]:
    return [
        (record["step"], record["metrics"]["train/loss"])
        for record in final_records(folder / "metrics.jsonl")
        if record["kind"] == "train"
    ]


def test_the_run_leaves_results_of_every_stage(finished: Run) -> None:
    results = finished.results
    assert results["status"] == "finished"
    assert set(results["seconds"]) == {"prepare", "train", "eval", "report"}
    assert results["train"]["tokens"] == 98_304
    assert len(results["train"]["phases"]) == 2
    assert set(results["train"]["validation"]) == {"recipe", "bf16"}
    domains = results["eval"]["domains"]
    assert set(domains) == {"code", "prose", "mathematics"}
    for domain in domains.values():
        assert 0 < domain["bits_per_byte"] < domain["untrained_bits_per_byte"]
        assert domain["bigram_bits_per_byte"] < domain["unigram_bits_per_byte"]
    task = results["eval"]["tasks"]["continuation"]
    assert task["chance"] == 0.25
    assert task["num_samples"] >= 40
    assert 0 < task["standard_error"] < 0.1


def test_training_lowers_the_loss_over_both_phases(finished: Run) -> None:
    curve = losses(finished.folder)
    assert [step for step, _ in curve] == list(range(1, 25))
    assert curve[-1][1] < curve[0][1] - 1.0


def test_the_recipe_is_what_ran(finished: Run) -> None:
    rows = {row["name"]: row for row in finished.results["precision_table"]}
    assert "NVFP4" in rows["blocks.1.ffn.up"]["fprop"].upper()
    assert "SR" in rows["blocks.1.ffn.up"]["dgrad"].upper()
    assert rows["blocks.0.mamba.out"]["fprop"].upper().count("NVFP4") == 0
    assert all(row["backend"] == "emulated" for row in rows.values())


def test_the_resolved_configuration_stands_in_the_run_and_its_checkpoint(finished: Run) -> None:
    config = yaml.safe_load((finished.folder / "config.yaml").read_text())
    found = checkpoint.latest(finished.folder / "checkpoints")
    assert found is not None
    assert found.state["config"] == config
    assert found.state["mlflow_run_id"] == finished.results["mlflow_run_id"]
    assert "${" not in json.dumps(config)


def test_the_report_is_one_file_that_needs_no_other(finished: Run) -> None:
    page = (finished.folder / "report.html").read_text()
    assert not re.search(r"""(src|href)=["']?https?://""", page)
    assert page.count("data:image/png;base64,") >= 2
    assert len(list((finished.folder / "figures").glob("*.png"))) >= 2


def test_the_last_lines_say_where_things_are_and_what_to_type_next(finished: Run) -> None:
    tail = finished.output[-1500:]
    assert str(finished.folder / "report.html") in tail
    assert f"-m mlflow ui --backend-store-uri sqlite:///{finished.root}/mlflow.db" in tail
    assert f"-m pipeline eval run={finished.folder.name}" in tail


def test_mlflow_holds_the_run_by_step_and_by_tokens(finished: Run) -> None:
    client = MlflowClient(f"sqlite:///{finished.root}/mlflow.db")
    run = client.get_run(finished.results["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["precision.recipe"] == "nvfp4"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((m.step, m.value) for m in history) == losses(finished.folder)
    by_tokens = client.get_metric_history(run.info.run_id, "by_tokens/train/loss")
    assert max(m.step for m in by_tokens) == 98_304
    domain = finished.results["eval"]["domains"]["code"]
    assert run.data.metrics["eval/domains/code/bits_per_byte"] == domain["bits_per_byte"]
    names = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"report.html", "figures", "config.yaml", "results.json"} <= names
    experiment = client.get_experiment_by_name("nvfp4-pretrain")
    models = client.search_logged_models([experiment.experiment_id])
    assert any(m.source_run_id == run.info.run_id for m in models)


def test_a_killed_run_resumes_to_the_bits_of_an_undisturbed_one(finished: Run) -> None:
    root = finished.root
    start_and_kill(root, "run", *SHORT, after_step=15)
    killed = run_folder(root)
    assert killed != finished.folder
    assert losses(killed)[-1][0] < 24
    result = pipeline(root, "run", *SHORT, "resume=true")
    assert result.returncode == 0, result.stderr
    assert run_folder(root) == killed
    assert weights(killed) == weights(finished.folder)
    assert losses(killed) == losses(finished.folder)
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    run_id = json.loads((killed / "results.json").read_text())["mlflow_run_id"]
    history = client.get_metric_history(run_id, "train/loss")
    assert sorted((m.step, m.value) for m in history) == losses(finished.folder)
    shutil.rmtree(killed)


def test_an_interrupted_run_says_how_to_go_on_and_exits_with_75(finished: Run) -> None:
    root = finished.root
    code = start_and_kill(root, "run", *SHORT, "seed=1", after_step=2, sig=signal.SIGINT)
    stopped = run_folder(root)
    assert code == 75
    assert json.loads((stopped / "results.json").read_text())["status"] == "interrupted"
    run_id = json.loads((stopped / "results.json").read_text())["mlflow_run_id"]
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    assert client.get_run(run_id).info.status == "KILLED"
    result = pipeline(root, "run", *SHORT, f"resume={stopped.name}")
    assert result.returncode == 2
    assert "seed (1 then, 0 now)" in result.stderr
    shutil.rmtree(stopped)


def test_a_named_run_told_to_stop_writes_a_checkpoint_and_the_same_command_goes_on(
    finished: Run,
) -> None:
    root, command = finished.root, ("run", *SHORT, "name=nightly")
    code = start_and_kill(root, *command, after_step=6, sig=signal.SIGTERM)
    stopped = root / "nightly"
    assert code == 75
    last = checkpoint.steps_in(stopped / "checkpoints")[-1]
    assert last == losses(stopped)[-1][0]  # not a step is lost, wherever it stopped
    assert last % 4 or last < 24
    result = pipeline(root, *command)
    assert result.returncode == 0, result.stderr
    assert losses(stopped)[last:][0][0] == last + 1
    assert weights(stopped) == weights(finished.folder)
    assert losses(stopped) == losses(finished.folder)
    again = pipeline(root, *command)
    assert again.returncode == 0
    assert "[train] done already" in again.stdout
    other = pipeline(root, *command, "train.learning_rate=1e-3")
    assert other.returncode == 2
    assert "train.learning_rate (0.004 then, 0.001 now)" in other.stderr
    assert "fork_from=nightly@" in other.stderr
    shutil.rmtree(stopped)


def test_a_permanent_failure_is_not_tried_again(finished: Run) -> None:
    command = ("run", *SHORT, "name=hopeless", "train.learning_rate=1e30", "train.clip_norm=1e30")
    first = pipeline(finished.root, *command)
    assert first.returncode == 1
    assert (finished.root / "hopeless" / "FAILED.json").is_file()
    again = pipeline(finished.root, *command)
    assert again.returncode == 2
    assert "failed for good" in again.stderr
    shutil.rmtree(finished.root / "hopeless")


def test_resume_without_an_unfinished_run_of_this_configuration_is_refused(finished: Run) -> None:
    result = pipeline(finished.root, "run", *SHORT, "resume=true")
    assert result.returncode == 2
    assert "no unfinished run" in result.stderr


def test_eval_reruns_alone_and_adds_to_the_run(finished: Run) -> None:
    before = finished.results
    result = pipeline(finished.root, "eval", "run=latest", "evals.num_questions=24")
    assert result.returncode == 0, result.stderr
    after = finished.results
    assert after["eval"]["domains"] == before["eval"]["domains"]
    assert after["eval"]["tasks"]["continuation"]["num_samples"] == 24
    assert after["train"] == before["train"]
    client = MlflowClient(f"sqlite:///{finished.root}/mlflow.db")
    assert client.get_run(after["mlflow_run_id"]).info.status == "FINISHED"


def test_status_tells_a_run_at_a_glance(finished: Run) -> None:
    result = pipeline(finished.root, "status", "run=latest")
    for expected in ("finished", "step        24 of 24", "checkpoint", "skipped     0"):
        assert expected in result.stdout


def test_two_ray_workers_train_the_same_data_to_the_same_loss(finished: Run) -> None:
    root = finished.root
    result = pipeline(root, "run", *SHORT, "cluster=cpu2", "stages=[prepare,train]")
    assert result.returncode == 0, result.stdout + result.stderr
    folder = run_folder(root)
    alone, together = losses(finished.folder), losses(folder)
    assert [step for step, _ in together] == [step for step, _ in alone]
    # The same micro-batches with the same bits; only the order of sums differs.
    assert together[0][1] == pytest.approx(alone[0][1], rel=1e-5)
    assert together[-1][1] == pytest.approx(alone[-1][1], rel=2e-2)
    shutil.rmtree(folder)
