"""Which runs a study has; its queue repeats nothing, loses nothing, and says what failed."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.cli import INCOMPLETE
from pipeline.compose import compose
from pipeline.config import ArmConfig, ConfigError, PermanentError, StudyConfig, from_dict
from pipeline.study import stage
from pipeline.study.plan import StudyRun, plan_study
from pipeline.study.queue import run_all
from pipeline.study.stage import run_study
from pipeline.study.tables import Tables, read
from tests.study import synthetic

SMALL = ["train=plain", "train.tokens=81920", "train.warmup_tokens=4096"]
ARMS = {
    "bf16": ArmConfig(("precision=bf16",), num_seeds=2),
    "late": ArmConfig(("precision=nvfp4",), trunk="paper", fork_at="70%"),
    "paper": ArmConfig(("precision=nvfp4",)),
}


def planned(**changes: object) -> list[StudyRun]:
    settings = {"name": "s", "arms": ARMS, "sizes": {"main": tuple(SMALL)}, "seeds": (0, 7)}
    study = StudyConfig(**{**settings, **changes})  # type: ignore[arg-type]
    return plan_study(study, compose, ["root=/nowhere"])


def test_runs_differ_in_what_their_arm_says_and_pair_by_seed() -> None:
    runs = {(run.arm, run.seed): run for run in planned()}
    assert set(runs) == {("bf16", 0), ("bf16", 7), ("paper", 0), ("late", 0)}
    first, second = runs["bf16", 0].config, runs["paper", 0].config
    assert first.data == second.data
    assert first.train == second.train
    assert (first.precision.recipe, second.precision.recipe) == ("bf16", "nvfp4")
    assert runs["bf16", 7].config.seed == 7
    assert all(run.config.root == "/nowhere" for run in runs.values())
    assert len({run.name for run in runs.values()}) == 4


def test_a_name_tells_the_configuration_and_nothing_else() -> None:
    before = [run.name for run in planned()]
    assert [run.name for run in planned(parallel=3)] == before
    changed = [run.name for run in planned(overrides=("train.learning_rate=0.001",))]
    assert not set(before) & set(changed)


def test_all_arms_have_a_seed_before_any_has_the_next() -> None:
    arms = {**ARMS, "paper": dataclasses.replace(ARMS["paper"], num_seeds=2)}
    order = [(run.seed, run.arm) for run in planned(arms=arms)]
    assert [seed for seed, _ in order] == [0, 0, 0, 7, 7]
    assert {arm for _, arm in order[:3]} == set(ARMS)


def test_a_study_that_is_interrupted_reports_what_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = synthetic.tables({"nvfp4": 0.003}, late=0.002)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def collect(runs: Sequence[StudyRun], root: Path) -> Tables:
        assert {run.arm for run in runs} == {"bf16"}
        kept = [row for row in made.rows if (row.arm, row.size) == ("bf16", "main")][: len(runs)]
        curves = {row.run: made.curves[row.run] for row in kept}
        return dataclasses.replace(made, rows=tuple(kept), curves=curves)

    monkeypatch.setattr(stage, "run_all", interrupt)
    monkeypatch.setattr(stage, "is_finished", lambda _, run: run.arm == "bf16")
    monkeypatch.setattr(stage.tables, "collect", collect)
    monkeypatch.setattr(stage, "saved_bytes_per_token", lambda _: 1.0)
    monkeypatch.setattr(stage, "measure_fidelity", None)  # not called: it takes minutes
    monkeypatch.setattr(stage, "measured", lambda *_: made.fidelity)  # what is there is kept
    ended: list[str] = []
    monkeypatch.setattr(stage.Tracker, "finish", lambda _, status: ended.append(status))
    settings = {"name": "s", "arms": {n: {"overrides": arm.overrides} for n, arm in ARMS.items()}}
    settings |= {"sizes": {"main": SMALL}, "seeds": [0, 7]}
    settings["arms"]["late"] |= {"trunk": "paper", "fork_at": "70%"}
    user = [f"root={tmp_path}", "tracking.offline=true"]
    with pytest.raises(KeyboardInterrupt):
        run_study(from_dict(compose(user) | {"study": settings}), compose, user)
    assert ended == ["KILLED"]
    assert read(tmp_path / "studies" / "s").fidelity == made.fidelity
    assert "1 of 3 runs" in capsys.readouterr().out
    assert "1 of 3 runs" in (tmp_path / "studies" / "s" / "report.html").read_text()


def test_a_fork_leaves_its_trunk_where_a_phase_begins_and_comes_after_it() -> None:
    runs = planned()
    late, paper = (next(run for run in runs if run.arm == arm) for arm in ("late", "paper"))
    assert runs.index(paper) < runs.index(late)
    assert (late.trunk, late.fork) == (paper.name, 14)
    assert late.config.train.fork_from == f"{paper.name}@14"
    with pytest.raises(ConfigError, match=r"arms.late .*fork_at=50%.*at 0, 70%"):
        planned(arms={**ARMS, "late": dataclasses.replace(ARMS["late"], fork_at="50%")})


def test_runs_that_the_command_line_makes_alike_are_refused() -> None:
    study = StudyConfig("s", {"bf16": ArmConfig(num_seeds=2)}, {"main": tuple(SMALL)})
    with pytest.raises(ConfigError, match=r"s-main-bf16-s0-.* and s-main-bf16-s1-.* are the same"):
        plan_study(study, compose, ["seed=1"])


def test_arms_may_differ_in_where_their_corpus_lies_alone() -> None:
    at = "data.sources.code.uris=[/{}]"
    arms = {name: ArmConfig(("data=debian", at.format(name))) for name in ("here", "there")}
    study = StudyConfig("s", arms, {"main": tuple(SMALL)}, baseline="here")
    assert len(plan_study(study, compose, [])) == 2


def test_a_mistake_names_its_arm() -> None:
    with pytest.raises(ConfigError, match=r"study.arms.odd at size main: precison"):
        planned(arms={**ARMS, "odd": ArmConfig(("precison=bf16",))})


@pytest.mark.parametrize(
    ("study", "message"),
    [
        ({"baseline": "bf61"}, "baseline=bf61: no such arm; did you mean bf16"),
        ({"arms": {"bf16": {"num_seeds": 9}}}, "num_seeds=9: the study has 3 seeds"),
        ({"arms": {"bf16": {"trunk": "bf16"}}}, "trunk and fork_at go together"),
        ({"arms": {"bf16": {}, "x": {"trunk": "y", "fork_at": "1%"}}}, "trunk=y: no such arm"),
        ({"arms": {"bf16": {"sizes": ["big"]}}}, "no size big; known: main"),
        (
            {
                "sizes": {"main": [], "big": []},
                "arms": {"bf16": {"sizes": ["big"]}, "x": {"trunk": "bf16", "fork_at": "1%"}},
            },
            "sizes or seeds that its trunk bf16 has not",
        ),
    ],
)
def test_a_study_that_contradicts_itself_is_refused(study: dict, message: str) -> None:
    raw = compose([]) | {
        "study": {"name": "s", "sizes": {"main": []}, "arms": {"bf16": {}}, **study}
    }
    with pytest.raises(ConfigError, match=message):
        from_dict(raw)


def test_tables_that_are_not_there_are_named(tmp_path: Path) -> None:
    study = {"name": "s", "sizes": {"main": []}, "arms": {"bf16": {}}, "tables": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"no tables of a study.*runs.csv"):
        run_study(from_dict(compose([]) | {"study": study}), compose, [])


FAKE = """
import json, pathlib, signal, sys, time
root, name = pathlib.Path(sys.argv[1]), sys.argv[2]
code, seconds = int(sys.argv[3]), float(sys.argv[4])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
with (root / "order").open("a") as file: file.write(name + "\\n")
time.sleep(seconds)
if code in (0, 3):
    (root / name).mkdir()
    (root / name / "results.json").write_text(json.dumps({"status": "finished"}))
sys.exit(code)
"""


def queue(root: Path, codes: dict[str, int], seconds: float = 0.0, parallel: int = 1) -> list[str]:
    """Bring the planned runs to their end as stand-ins; the arms in the order of their starts."""

    def command(run: StudyRun) -> list[str]:
        code, name = codes.get(run.arm, 0), run.name
        return [sys.executable, "-c", FAKE, str(root), name, str(code), str(seconds)]

    (root / "order").unlink(missing_ok=True)
    run_all(planned(), root, root / "logs", parallel, command)
    return started(root)


def started(root: Path) -> list[str]:
    """The arms of the last call's runs, in the order of their starts."""
    order = root / "order"
    return [name.split("-")[2] for name in order.read_text().split()] if order.exists() else []


def test_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    assert sorted(queue(tmp_path, {})) == ["bf16", "bf16", "late", "paper"]
    assert queue(tmp_path, {}) == []


def test_forks_wait_for_their_trunk_also_in_parallel(tmp_path: Path) -> None:
    order = queue(tmp_path, {}, seconds=0.2, parallel=4)
    assert order[-1] == "late"


def test_a_failure_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match=r"2 runs(?s:.*)exit code 1(?s:.*)its trunk .* failed"):
        queue(tmp_path, {"paper": 1})
    assert started(tmp_path) == ["bf16", "paper", "bf16"]
    assert queue(tmp_path, {}) == ["paper", "late"]


def test_a_run_whose_tasks_lack_their_data_has_finished(tmp_path: Path) -> None:
    assert sorted(queue(tmp_path, {"paper": INCOMPLETE})) == ["bf16", "bf16", "late", "paper"]


def test_a_run_that_asks_to_be_tried_again_ends_the_sitting(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        queue(tmp_path, {"paper": 75})


def test_an_interrupt_reaches_every_run_and_another_call_goes_on(tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "order").exists():
            time.sleep(0.02)
        time.sleep(0.2)
        asked.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    asked: list[float] = []
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            queue(tmp_path, {}, seconds=600, parallel=2)
    finally:
        signal.signal(signal.SIGINT, former)
    assert time.monotonic() - asked[0] < 300
    assert len(queue(tmp_path, {})) == 4
