"""Children of runs: each begins where its parent stood, to the bit, and then goes its own way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import Config, ConfigError, PhaseConfig
from pipeline.data.mixture import Mixture
from pipeline.data.shards import Dataset, content_hash, describe_file
from pipeline.lineage import lineage_of, schedule_of
from pipeline.runs import RunFolder
from pipeline.train.build import build_mixture
from tests.data.corpora import document, write_corpus
from tests.train.tiny import (
    EVEN,
    GLOBAL_BATCH,
    STEP_TOKENS,
    configuration,
    corpus,
    curve_of,
    same_bits,
    start,
    state_of,
    tensors_of,
    train,
    train_until,
)

FORK = 6  # the parent's last step


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus") / "tiny")


@pytest.fixture(scope="module")
def parent(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of one stable phase that got to its end: for children, not to change."""
    config = configuration(tmp_path_factory.mktemp("runs"), FORK)
    run = start(config, "parent")
    train(config, run, dataset)
    return run


def child_of(
    parent: RunFolder, name: str, steps: int, **changes: object
) -> tuple[Config, RunFolder]:
    """A child of the parent's last checkpoint, not yet trained."""
    fork_from = changes.pop("fork_from", f"{parent.id}@{FORK}")
    config = configuration(parent.path.parent, steps, fork_from=fork_from, **changes)
    return config, start(config, name)


def rows_of(mixture: Mixture, first_step: int, end_step: int) -> dict[str, list[int]]:
    """The rows of each source in the order in which these steps take them."""
    units = np.arange(first_step * GLOBAL_BATCH, end_step * GLOBAL_BATCH)
    sources, rows = mixture.locate(units)
    return {name: rows[sources == number].tolist() for number, name in enumerate(mixture.names)}


def test_an_extended_run_ends_as_an_undisturbed_longer_one(
    parent: RunFolder, dataset: Path
) -> None:
    config, child = child_of(parent, "longer", 10)
    train(config, child, dataset)
    undisturbed = configuration(parent.path.parent, 10)
    whole = start(undisturbed, "undisturbed")
    train(undisturbed, whole, dataset)
    assert same_bits(tensors_of(child), tensors_of(whole))
    assert curve_of(child) == curve_of(whole, FORK + 1)
    assert state_of(child, 10)["window"] == state_of(whole, 10)["window"]


def test_a_grandchild_of_unchanged_runs_does_too(parent: RunFolder, dataset: Path) -> None:
    config, child = child_of(parent, "generation-2", 8)
    train(config, child, dataset)
    config, grandchild = child_of(parent, "generation-3", 10, fork_from="generation-2@8")
    train(config, grandchild, dataset)
    undisturbed = configuration(parent.path.parent, 10)
    whole = start(undisturbed, "undisturbed-by-generations")
    train(undisturbed, whole, dataset)
    assert same_bits(tensors_of(grandchild), tensors_of(whole))


def test_a_changed_blend_begins_at_the_fork_and_goes_on_with_each_source_s_rows(
    parent: RunFolder, dataset: Path
) -> None:
    phases = (PhaseConfig(blend={"code": 0.25, "prose": 0.75}),)
    config, child = child_of(parent, "prose", 12, phases=phases)
    mixture = train(config, child, dataset).setup.mixture
    undisturbed = configuration(parent.path.parent, 30)  # of the parent's blend to the end
    former = build_mixture(undisturbed, schedule_of(undisturbed, None), Dataset.open(dataset))
    units = np.arange(FORK * GLOBAL_BATCH)
    for mine, parents in zip(mixture.locate(units), former.locate(units), strict=True):
        assert np.array_equal(mine, parents)
    own = rows_of(mixture, FORK, 12)
    assert 0.6 < len(own["prose"]) / (6 * GLOBAL_BATCH) < 0.9
    for name, rows in rows_of(mixture, 0, 12).items():
        assert rows == rows_of(former, 0, 30)[name][: len(rows)]  # the source's own order
        assert len(set(rows)) == len(rows)


def test_a_child_needs_its_parent_no_more_once_it_has_begun(
    parent: RunFolder, dataset: Path, tmp_path: Path
) -> None:
    home = Path(shutil.copytree(parent.path, tmp_path / "parent"))
    config, child = child_of(RunFolder(home), "child", 10)
    train_until(config, child, dataset, FORK + 1)
    shutil.rmtree(home)
    train(config, child, dataset)
    whole, _ = child_of(parent, "beside", 10)
    train(whole, RunFolder(parent.path.parent / "beside"), dataset)
    assert same_bits(tensors_of(child), tensors_of(RunFolder(parent.path.parent / "beside")))


def test_the_fork_s_checkpoint_is_the_child_s_own(parent: RunFolder, dataset: Path) -> None:
    config, child = child_of(parent, "own", FORK + 1)
    train(config, child, dataset)
    assert same_bits(tensors_of(child, FORK), tensors_of(parent, FORK))
    lineage = lineage_of(child)
    assert lineage is not None
    assert state_of(child, FORK)["lineage"] == lineage.to_dict()
    assert curve_of(child)[0][1] == FORK + 1


def test_a_decay_branches_off_a_stable_phase(parent: RunFolder, dataset: Path) -> None:
    phases = (PhaseConfig(blend=EVEN), PhaseConfig(start=7 * STEP_TOKENS, learning_rate="decay"))
    config, child = child_of(parent, "decay", 11, phases=phases)
    train(config, child, dataset)
    rates = {step: values["train/learning_rate"] for kind, step, values in curve_of(child)
             if kind == "train"}  # fmt: skip
    assert rates[FORK + 1] == 3e-3  # step 6 is still stable
    assert list(rates.values()) == sorted(rates.values(), reverse=True)
    assert rates[11] == pytest.approx(3e-5)
    whole_config = configuration(parent.path.parent, 11, phases=phases)
    whole = start(whole_config, "decayed-from-the-beginning")
    train(whole_config, whole, dataset)
    assert same_bits(tensors_of(child), tensors_of(whole))


def test_a_decay_that_should_have_begun_before_begins_at_the_fork(
    parent: RunFolder, dataset: Path
) -> None:
    phases = (PhaseConfig(blend=EVEN), PhaseConfig(start="50%", learning_rate="decay"))
    config, child = child_of(parent, "late-decay", 10, phases=phases)
    schedule = schedule_of(config, child)
    assert schedule.decay_start == FORK
    assert schedule.boundaries() == (FORK,)
    rates = schedule.learning_rates(np.arange(FORK - 1, 10))
    assert rates == pytest.approx(np.linspace(3e-3, 3e-5, 5))


def test_another_precision_from_the_fork_on(parent: RunFolder, dataset: Path) -> None:
    phases = (PhaseConfig(blend=EVEN, precision="bf16"),)
    config, child = child_of(parent, "bf16", FORK + 2, phases=phases)
    train(config, child, dataset)
    continued, beside = child_of(parent, "nvfp4", FORK + 2)
    train(continued, beside, dataset)
    losses = [[values["train/loss"] for kind, _, values in curve_of(run) if kind == "train"]
              for run in (child, beside)]  # fmt: skip
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_a_child_that_was_interrupted_goes_on_by_itself(parent: RunFolder, dataset: Path) -> None:
    phases = (PhaseConfig(blend={"code": 0.25, "prose": 0.75}),)
    config, cut = child_of(parent, "cut", 10, phases=phases)
    train_until(config, cut, dataset, FORK + 3)
    train(config, cut, dataset)
    _, whole = child_of(parent, "uncut", 10, phases=phases)
    train(config, whole, dataset)
    assert same_bits(tensors_of(cut), tensors_of(whole))
    assert curve_of(cut) == curve_of(whole)


def test_a_child_may_have_other_text_but_no_other_tokenizer(
    parent: RunFolder, tmp_path: Path
) -> None:
    config, child = child_of(parent, "retokenized", 8)
    folder = corpus(tmp_path / "corpus")
    manifest = json.loads((folder / "manifest.json").read_text())
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    manifest["tokenizer"] |= describe_file(folder, tokenizer.name)
    manifest["content_hash"] = content_hash(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"another tokenizer.*data\.tokenizer\.path"):
        train(config, child, folder)
    other = [document(5 * i, 30 + (13 * i) % 70) for i in range(200)]
    changed = write_corpus(
        tmp_path / "other", {"code": other[:100], "prose": other[100:]}, holdout=other[:3]
    )
    train(config, child, changed)
