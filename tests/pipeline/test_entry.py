"""The entry point of a job: what is tried again, what is not, and how it stops."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import cli, entry, lifecycle
from pipeline.config import (
    ClusterConfig,
    Config,
    ConfigError,
    IncompleteError,
    KubernetesConfig,
    PermanentError,
    SourceConfig,
    UnreachableError,
)
from pipeline.runs import RunFolder, locked, root_folder
from pipeline.train import checkpoint
from tests.train.tiny import STEP_TOKENS, configuration, corpus, same_bits, start, tensors_of, train


def named(root: Path, **changes: Any) -> tuple[Config, RunFolder]:
    config = dataclasses.replace(configuration(root, 4), name="mine", **changes)
    return config, RunFolder(root_folder(config) / "mine")


def failing(error: BaseException) -> Any:
    calls: list[None] = []

    def start(config: Config, stages: tuple[str, ...]) -> None:
        calls.append(None)
        raise error

    start.calls = calls  # type: ignore[attr-defined]
    return start


@pytest.mark.parametrize(
    ("error", "code", "marked"),
    [
        (ConfigError("a mistake"), cli.USER_MISTAKE, True),
        (PermanentError("diverged"), cli.FAILURE, True),
        (UnreachableError("no store"), cli.TRY_AGAIN, False),
        (KeyboardInterrupt(), cli.TRY_AGAIN, False),
    ],
)
def test_only_what_a_retry_would_repeat_leaves_the_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, marked: bool
) -> None:
    config, run = named(tmp_path)
    attempt = failing(error)
    monkeypatch.setattr(lifecycle, "start", attempt)
    assert entry.attempt(config, run) == code
    assert run.failure.is_file() == marked
    assert entry.attempt(config, run) == code if not marked else cli.USER_MISTAKE
    assert len(attempt.calls) == (1 if marked else 2)  # the second attempt does nothing


def test_a_mended_configuration_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = named(tmp_path)
    monkeypatch.setattr(lifecycle, "start", failing(ConfigError("a mistake")))
    entry.attempt(config, run)
    monkeypatch.setattr(lifecycle, "start", lambda config, stages: None)
    assert entry.attempt(config, run) == cli.USER_MISTAKE
    mended, _ = named(tmp_path, seed=7)
    assert entry.attempt(mended, run) == entry.DONE
    assert not run.failure.exists()


def test_a_job_that_evaluates_says_nothing_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = named(tmp_path)
    judge = dataclasses.replace(config, stages=("eval", "report"))
    monkeypatch.setattr(lifecycle, "start", failing(PermanentError("diverged")))
    assert entry.attempt(judge, run) == cli.USER_MISTAKE  # there is no such run to evaluate
    assert "no such run" in capsys.readouterr().err
    assert run.eval_failure.is_file()
    assert not run.failure.exists()
    assert entry.attempt(config, run) == cli.FAILURE
    run.eval_failure.unlink()
    evaluated: list[Config] = []
    monkeypatch.setattr(lifecycle, "evaluate", evaluated.append)
    assert entry.attempt(judge, run) == entry.DONE
    assert evaluated == [judge]
    assert run.failure.is_file()  # still no retry trains what diverged

    def lacking(_: Config) -> None:
        raise IncompleteError("no data of mmlu")

    monkeypatch.setattr(lifecycle, "evaluate", lacking)
    assert entry.attempt(judge, run) == entry.DONE
    assert "incomplete: no data of mmlu" in capsys.readouterr().err


def test_a_job_that_prepares_only_evaluates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = named(tmp_path, stages=("prepare",))
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(lifecycle, "start", lambda config, stages: started.append(stages))
    assert entry.attempt(config, run) == entry.DONE
    assert started == [("prepare",)]


@pytest.mark.parametrize("text", ["seed: [", "seed: 0", "nothing: 1"])
def test_a_file_that_is_no_configuration_is_the_users_mistake(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        entry.main([str(file)])
    assert end.value.code == cli.USER_MISTAKE


def test_a_run_without_a_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(configuration(tmp_path, 4).to_dict()))
    with pytest.raises(SystemExit) as end:
        entry.main([str(file)])
    assert end.value.code == cli.USER_MISTAKE


def test_nodes_that_do_not_come_are_waited_for_and_then_not_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    pods = KubernetesConfig(image="none", wait_seconds=1)
    config, _ = named(tmp_path, cluster=ClusterConfig(workers=2, address="auto", kubernetes=pods))
    available = iter([{"CPU": 0.0}, {"CPU": 1.0}, {"CPU": 2.0}])
    monkeypatch.setattr("pipeline.ray_session.start_ray", lambda address: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: next(available))
    entry.wait_for_nodes(config, sleep=lambda seconds: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1.0})
    with pytest.raises(UnreachableError, match="2 workers need 2 CPU"):
        entry.wait_for_nodes(config, sleep=lambda seconds: time.sleep(0.3))


def test_stop_asks_a_run_that_is_under_way_and_no_other(tmp_path: Path) -> None:
    _, run = named(tmp_path)
    assert entry.stop(run, 1.0) == entry.DONE  # there is none
    run.path.mkdir(parents=True)
    run.results.write_text(json.dumps({"status": "running"}))
    assert entry.stop(run, 1.0) == entry.DONE  # its process is gone
    assert not run.stop.exists()
    with locked(run):
        assert entry.stop(run, 0.1) == cli.FAILURE  # nobody answered in time
        assert run.stop.exists()


@pytest.mark.slow
def test_sigterm_ends_with_a_checkpoint_and_the_next_attempt_goes_on(tmp_path: Path) -> None:
    dataset, steps = corpus(tmp_path / "corpus"), 60
    text = tmp_path / "text.txt"
    text.write_text("any text will do, the corpus is prepared")
    config = configuration(tmp_path, steps, checkpoint_every_tokens=steps * STEP_TOKENS)
    sources = {name: SourceConfig(uris=(str(text),)) for name in ("code", "prose")}
    data = dataclasses.replace(config.data, sources=sources)
    config = dataclasses.replace(config, name="mine", data=data)
    run = RunFolder(root_folder(config) / "mine")
    run.stages.mkdir(parents=True)
    prepared = {"seconds": 0, "output": {"dataset": str(dataset)}}
    (run.stages / "prepare.json").write_text(json.dumps(prepared))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()))
    command = [sys.executable, "-m", "pipeline.entry", str(file)]

    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not (run.metrics.is_file() and run.metrics.read_text().count('"train"') > 3):
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    assert first.wait(300) == cli.TRY_AGAIN
    (stopped,) = checkpoint.steps_in(run.checkpoints)
    assert 0 < stopped < steps
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == entry.DONE, second.stderr
    assert f"the newest checkpoint is of step {stopped}" in second.stdout
    alone = start(config, "alone")
    train(config, alone, dataset)
    assert same_bits(tensors_of(run, steps), tensors_of(alone, steps))
