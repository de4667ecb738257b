"""`train.profile_steps`: a trace of those steps, and of no others."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from pipeline.config import Config, ConfigError
from pipeline.config.checks import validate
from pipeline.train.profiling import ProfiledSteps
from tests.train.tiny import configuration, corpus, start, train, train_until


def steps_in_trace(folder: Path, window: tuple[int, ...], steps: Iterable[int]) -> list[str]:
    """The marks of the steps that the trace holds, after going through `steps`."""
    profiled = ProfiledSteps(window, folder)
    for step in steps:
        profiled.before(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(3).sum()
        profiled.after(step)
    return [name for file in folder.glob("*") for name in names_in(file) if "step " in name]


def names_in(trace: Path) -> list[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event.get("name", "") for event in events]


def test_the_trace_holds_the_window_s_steps_and_their_operations(tmp_path: Path) -> None:
    found = steps_in_trace(tmp_path / "profile", (2, 3), range(6))
    assert set(found) == {"step 2", "step 3"}
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "steps-2-3.json.gz"
    assert "aten::sum" in names_in(file)


def test_without_a_window_nothing_is_written(tmp_path: Path) -> None:
    assert steps_in_trace(tmp_path / "profile", (), range(4)) == []
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("left_out", [2, 4])
def test_a_step_that_is_left_out_moves_neither_end(tmp_path: Path, left_out: int) -> None:
    steps = [step for step in range(8) if step != left_out]
    found = steps_in_trace(tmp_path / "profile", (2, 4), steps)
    assert set(found) == {f"step {step}" for step in (2, 3, 4) if step != left_out}


@pytest.mark.slow
def test_a_run_that_resumes_within_the_window_traces_the_rest(tmp_path: Path) -> None:
    config = configuration(tmp_path, 4, profile_steps=(1, 2))
    run, dataset = start(config, "run"), corpus(tmp_path / "corpus")
    train_until(config, run, dataset, 2)
    train(config, run, dataset)
    traces = sorted(run.profile.iterdir())
    assert [file.name for file in traces] == ["steps-1-1.json.gz", "steps-2-2.json.gz"]
    for file in traces:
        assert "aten::mm" in names_in(file)


@pytest.mark.parametrize("window", [(3,), (4, 2), (-1, 2), (1, 2, 3)])
def test_what_is_no_window_is_refused(tmp_path: Path, window: tuple[int, ...]) -> None:
    def checked(steps: tuple[int, ...]) -> Config:
        config = configuration(tmp_path, 6, profile_steps=steps)
        validate(config)
        return config

    checked((2, 4))
    with pytest.raises(ConfigError, match="profile_steps"):
        checked(window)
