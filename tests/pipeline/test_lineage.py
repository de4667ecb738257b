"""What a child may change, what it is told where it may not, and what a family is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml

from pipeline.config import Config, ConfigError, PhaseConfig, differences
from pipeline.lineage import Lineage, family, fork, lineage_of, schedule_of, write_lineage
from pipeline.runs import RunFolder
from pipeline.train import checkpoint
from pipeline.train.schedule import Phase
from tests.train.tiny import EVEN, configuration, with_data, with_train

STEPS = 10


def run_with(config: Config, name: str, *steps: int) -> RunFolder:
    """A run's folder with checkpoints that hold next to nothing."""
    run = RunFolder(Path(config.root) / name)
    run.checkpoints.mkdir(parents=True)
    run.config.write_text(yaml.safe_dump(config.to_dict()))
    tensors = {"model": {"weight": torch.zeros(1)}, "optimizer": {"step": torch.zeros(1)}}
    for step in steps:
        checkpoint.save(run.checkpoints, step, tensors, {})
    return run


@pytest.fixture
def parent(tmp_path: Path) -> RunFolder:
    return run_with(configuration(tmp_path, STEPS), "parent", 4, 8)


def child(parent: RunFolder, fork_from: str = "parent@8", **changes: object) -> Config:
    return configuration(parent.path.parent, 12, fork_from=fork_from, **changes)


def test_a_child_knows_parent_step_and_what_differs(parent: RunFolder) -> None:
    (parent.path / "tracking.json").write_text(json.dumps({"run_id": "abc"}))
    lineage = fork(child(parent, learning_rate=1e-3))
    assert (lineage.parent, lineage.step, lineage.tokens) == ("parent", 8, 8 * 64)
    assert lineage.mlflow_parent == "abc"
    assert lineage.difference == (
        "train.learning_rate (0.003 then, 0.001 now)",
        "train.tokens (640 then, 768 now)",
    )
    assert lineage.past == (Phase(0, 8, EVEN, 16, "stable", "recipe"),)


def test_what_is_written_is_what_is_read(parent: RunFolder, tmp_path: Path) -> None:
    lineage = fork(child(parent))
    run = run_with(child(parent), "child")
    assert lineage_of(run) is None
    write_lineage(run, lineage)
    assert lineage_of(run) == lineage


def test_keys_around_a_run_are_no_difference(parent: RunFolder) -> None:
    config = dataclasses.replace(child(parent), name="x", step=3, stages=("prepare",))
    fidelity = dataclasses.replace(config.fidelity, num_draws=3)
    lineage = fork(dataclasses.replace(config, fidelity=fidelity))
    assert [item.split()[0] for item in lineage.difference] == ["train.tokens"]


@pytest.mark.parametrize(
    ("fork_from", "message"),
    [
        ("parent", "give <run>@<step>"),
        ("parent@last", "give <run>@<step>"),
        ("parnet@8", "no such run.*did you mean parent"),
        ("parent@7", "no checkpoint of step 7; there are: 4, 8"),
    ],
)
def test_an_unknown_place_is_refused_with_those_there_are(
    parent: RunFolder, fork_from: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fork(child(parent, fork_from))


def test_a_damaged_checkpoint_is_refused_with_its_file(parent: RunFolder) -> None:
    file = next(parent.checkpoints.glob("step-00000008/model-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{file.name}.*checksum"):
        fork(child(parent))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"global_batch": 8}, r"train\.global_batch \(4 then, 8 now\)"),
        ({"sequence_length": 32}, r"train\.sequence_length \(16 then, 32 now\)"),
    ],
)
def test_what_gives_a_step_its_units_stays(
    parent: RunFolder, change: dict[str, object], key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        fork(child(parent, **change))


def test_the_model_and_the_order_of_data_stay(parent: RunFolder) -> None:
    config = child(parent)
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, hidden_size=64))
    with pytest.raises(ConfigError, match=r"model\.hidden_size \(32 then, 64 now\)"):
        fork(wider)
    with pytest.raises(ConfigError, match=r"data\.seed \(0 then, 3 now\)"):
        fork(with_data(config, seed=3))


def test_a_child_that_ends_before_the_fork_is_refused(parent: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"ends at step 6, not after the fork at step 8"):
        fork(with_train(child(parent), tokens=6 * 64))


def test_before_the_fork_the_schedule_is_the_parent_s(parent: RunFolder) -> None:
    config = child(parent, phases=(PhaseConfig(blend={"prose": 1.0}),))
    run = run_with(config, "child")
    write_lineage(run, fork(config))
    schedule = schedule_of(config, run)
    parents = schedule_of(configuration(parent.path.parent, STEPS), parent)
    assert [(phase.start_step, phase.end_step) for phase in schedule.phases] == [(0, 8), (8, 12)]
    assert [dict(phase.blend) for phase in schedule.phases] == [EVEN, {"prose": 1.0}]
    assert schedule.fingerprint(8) != parents.fingerprint(8)  # it knows where it comes from
    other = fork(with_train(config, learning_rate=1e-3)).schedule_past
    assert other.fingerprint == parents.fingerprint(8)


def relative(root: Path, name: str, parent: str | None, step: int = 0) -> RunFolder:
    run = RunFolder(root / name)
    run.path.mkdir()
    run.config.write_text("seed: 0\n")
    if parent:
        write_lineage(run, Lineage(parent, step, 0, "", (), (), ""))
    return run


def test_a_family_is_all_that_descend_from_the_first_ancestor(tmp_path: Path) -> None:
    relative(tmp_path, "a", None)
    middle = relative(tmp_path, "b", "a", 4)
    relative(tmp_path, "c", "b", 6)
    relative(tmp_path, "d", "a", 4)
    relative(tmp_path, "stranger", None)
    for start in ("a", "b", "c", "d"):
        members = [run.id for run, _ in family(RunFolder(tmp_path / start))]
        assert sorted(members) == ["a", "b", "c", "d"]
        assert members.index("a") < members.index("b") < members.index("c")
    assert [run.id for run, _ in family(RunFolder(tmp_path / "stranger"))] == ["stranger"]
    assert lineage_of(middle) is not None


def test_a_family_whose_ancestor_was_removed_begins_with_its_oldest_member(tmp_path: Path) -> None:
    relative(tmp_path, "b", "gone", 4)
    relative(tmp_path, "c", "b", 6)
    assert [run.id for run, _ in family(RunFolder(tmp_path / "c"))] == ["b", "c"]


def test_differences_name_keys_with_both_values() -> None:
    then, now = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}, "d": 5, "e": 6}
    assert differences(then, now, {"d"}) == ["a.c (2 then, 4 now)", "e (None then, 6 now)"]
