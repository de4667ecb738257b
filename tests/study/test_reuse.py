"""Runs that finished elsewhere are taken from their tables, where they are the same runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.compose import compose
from pipeline.config import ConfigError, StudyConfig, from_dict
from pipeline.study import reuse, stage, tables
from pipeline.study.plan import StudyRun, plan_study
from pipeline.study.stage import run_study
from tests.study.synthetic import TOKENS
from tests.study.synthetic import tables as synthetic

USER = ["tracking.offline=true", "data=builtin"]
STUDY = {
    "name": "s",
    "sizes": {"main": ["train=plain", "train.tokens=81920", "train.warmup_tokens=4096"]},
    "seeds": [0, 7],
    "arms": {
        "bf16": {"overrides": ["precision=bf16"], "num_seeds": 2},
        "paper": {"overrides": ["precision=nvfp4"]},
        "late": {"overrides": ["precision=nvfp4"], "trunk": "paper", "fork_at": "70%"},
    },
}


def study(known: Sequence[str | Path] = ()) -> StudyConfig:
    raw = compose(USER) | {"study": {**STUDY, "reuse": [str(folder) for folder in known]}}
    made = from_dict(raw).study
    assert made is not None
    return made


def planned(user: Sequence[str] = ()) -> list[StudyRun]:
    return plan_study(study(), compose, [*USER, *user])


def elsewhere(folder: Path, runs: Sequence[StudyRun]) -> str:
    """Tables of these runs as another machine would have left them."""
    made = synthetic({})
    like = made.rows[0]
    rows = [
        dataclasses.replace(
            like, run=f"there-{run.name}", arm=run.arm, size=run.size, seed=run.seed,
            configuration=run.configuration, fork_tokens=TOKENS // 2 if run.fork else None,
        )
        for run in runs
    ]  # fmt: skip
    curves = {row.run: made.curves[like.run] for row in rows}
    health = tuple({**made.health[0], "run": row.run} for row in rows)
    tables.write(tables.Tables(tuple(rows), curves, health, made.fidelity), folder)
    return str(folder)


def test_a_configuration_is_the_same_wherever_its_files_lie() -> None:
    corpus = ["data=debian", "data.sources.code.uris=[/there]", "root=/elsewhere"]
    here, there = planned(["data=debian"]), planned(corpus)
    assert [run.configuration for run in here] == [run.configuration for run in there]
    assert not {run.name for run in here} & {run.name for run in there}
    assert len({run.configuration for run in here}) == 4
    changed = planned(["data=debian", "train.clip_norm=0.5"])
    assert not {run.configuration for run in changed} & {run.configuration for run in here}


def test_known_runs_are_taken_and_those_of_another_configuration_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = planned()
    bf16, paper = runs[0], next(run for run in runs if run.arm == "paper")
    odd = dataclasses.replace(paper, configuration="of another recipe")
    stranger = dataclasses.replace(bf16, arm="fp8_block", name="stranger")
    first = elsewhere(tmp_path / "first", [bf16, odd, stranger])
    second = elsewhere(tmp_path / "second", [bf16, paper])
    found = reuse.known(study([first, second]), runs)
    assert [row.arm for row in found.rows] == ["bf16", "paper"]
    assert set(found.curves) == {row.run for row in found.rows}
    assert {each["run"] for each in found.health} == set(found.curves)
    assert found.fidelity
    alone = elsewhere(tmp_path / "alone", [paper])
    assert not reuse.known(study([alone]), runs).fidelity  # it was measured along a baseline's run
    out = capsys.readouterr().out
    assert f"1 runs are known from {first}" in out
    assert f"of another configuration, and so not taken: there-{paper.name}" in out


@pytest.mark.parametrize("header", [None, "run,arm,size,seed\nx,bf16,main,0\n"])
def test_a_folder_without_tables_is_named(tmp_path: Path, header: str | None) -> None:
    if header:
        (tmp_path / "runs.csv").write_text(header)
    with pytest.raises(ConfigError, match=rf"{tmp_path}: no tables of a study"):
        reuse.known(study([tmp_path]), planned())


def study_of(tmp_path: Path, known: Sequence[str]) -> tuple[dict, list[str]]:
    user = [*USER, f"root={tmp_path}"]
    return compose(user) | {"study": {**STUDY, "reuse": list(known)}}, user


def test_only_what_is_not_known_is_run_and_a_trunk_that_a_fork_has_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = planned([f"root={tmp_path}"])
    all_but_late = elsewhere(tmp_path / "known", [run for run in runs if run.arm != "late"])
    asked: list[str] = []

    def run_all(todo: Sequence[StudyRun], root: Path, *_: object) -> None:
        asked.extend(run.arm for run in todo)

    monkeypatch.setattr(stage, "run_all", run_all)
    monkeypatch.setattr(stage.reuse, "check_data", lambda *_: None)
    raw, user = study_of(tmp_path, [all_but_late])
    run_study(from_dict(raw), compose, user)
    assert asked == ["paper", "late"]
    assert "3 of 4 runs" in capsys.readouterr().out
    written = tables.read(tmp_path / "studies" / "s")
    assert [row.arm for row in written.rows] == ["bf16", "paper", "bf16"]
    assert written.fidelity  # known, and so not measured again
    asked.clear()
    raw, user = study_of(tmp_path, [elsewhere(tmp_path / "all", runs)])
    run_study(from_dict(raw), compose, user)
    assert asked == []


def test_a_known_run_of_other_data_is_refused_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus").mkdir()
    manifest = {"content_hash": "another"}
    monkeypatch.setattr(reuse, "prepare", lambda *_, **__: tmp_path / "corpus")
    monkeypatch.setattr(reuse, "read_manifest", lambda _: manifest)
    monkeypatch.setattr(stage, "run_all", None)  # not called
    runs = planned([f"root={tmp_path}"])
    raw, user = study_of(tmp_path, [elsewhere(tmp_path / "known", runs[:1])])
    with pytest.raises(ConfigError, match=rf"there-{runs[0].name} was trained on other data"):
        run_study(from_dict(raw), compose, user)
    manifest["content_hash"] = "data"
    reuse.check_data(reuse.known(study(raw["study"]["reuse"]), runs), runs, runs)


def test_known_runs_of_different_data_are_not_paired_even_where_nothing_is_left_to_run(
    tmp_path: Path,
) -> None:
    runs = planned([f"root={tmp_path}"])
    known = tables.read(Path(elsewhere(tmp_path / "known", runs)))
    reuse.check_data(known, runs, [])
    rows = (dataclasses.replace(known.rows[0], data="another"), *known.rows[1:])
    with pytest.raises(ConfigError, match=rf"on other data .* than {rows[0].run} \(another\)"):
        reuse.check_data(dataclasses.replace(known, rows=rows), runs, [])


def test_a_run_of_here_comes_before_the_same_of_elsewhere() -> None:
    made = synthetic({"nvfp4": 0.003})
    here = reuse.only(made, [made.rows[0].run])
    renamed = tuple(dataclasses.replace(row, run=f"there-{row.run}") for row in made.rows)
    there = dataclasses.replace(
        made, rows=renamed, curves={row.run: made.curves[row.run[6:]] for row in renamed}
    )
    merged = reuse.merged(here, there)
    assert merged.rows == (made.rows[0], *renamed[1:])
    assert set(merged.curves) == {row.run for row in merged.rows}
