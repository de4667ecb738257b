"""`python -m pipeline eval`: what it can name, what it keeps, what MLflow and the report show."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import fs

from evals.lm import Hybrid
from evals.scoring import plan_batches, score_groups
from pipeline.config import Config, ConfigError
from pipeline.data.shards import Dataset
from pipeline.evaluation import command as evaluation
from pipeline.evaluation import targets
from pipeline.evaluation.command import _require_room
from pipeline.evaluation.tables import others
from pipeline.evaluation.targets import of_checkpoint
from pipeline.runs import RunFolder
from pipeline.train import checkpoint
from tests.pipeline.exported import STEPS, command, trained_run

pytestmark = pytest.mark.slow

QUESTIONS = [
    {"query": f"Question: number {i}?\n", "choices": [f"word {i}", f"{i} words or"], "gold": i % 2}
    for i in range(10)
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RunFolder]:
    return trained_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "piqa.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    return folder


@pytest.fixture
def local(files: Path) -> tuple[str, ...]:
    return ("evals.tasks=[local_piqa]", f"evals.files={files}", "max_length=128", "batch_size=4")


def corpus_of(run: RunFolder) -> Path:
    return Path(json.loads((run.stages / "prepare.json").read_text())["output"]["dataset"])


def results(run: RunFolder, step: int) -> dict[str, Any]:
    return json.loads((run.evals / f"step-{step:08d}" / "results.json").read_text())


def test_a_run_a_checkpoint_and_an_mlflow_id_name_the_same(
    trained: tuple[Config, RunFolder], local: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = trained
    assert command(run, "eval", "tracking.offline=false", *local) == 0
    first = results(run, STEPS)
    assert (first["step"], first["precision"]) == (STEPS, "bf16")
    assert first["tokens"] == STEPS * 4 * 16
    assert first["domains"]["code"]["bits_per_byte"] > 0
    assert "(kept)" not in capsys.readouterr().out
    mlflow_id = json.loads((run.path / "tracking.json").read_text())["run_id"]
    place = f"{run.checkpoints}/step-{STEPS:08d}"
    for name in (place, mlflow_id, f"file://{place}", run.path):
        assert command(run, "eval", "tracking.offline=false", *local, f"run={name}") == 0
        assert "(kept)" in capsys.readouterr().out
    assert results(run, STEPS) == first


def test_all_steps_give_a_curve_in_the_report_and_in_mlflow(
    trained: tuple[Config, RunFolder], local: tuple[str, ...]
) -> None:
    from mlflow import MlflowClient

    _, run = trained
    assert command(run, "eval", "tracking.offline=false", "step=all", *local) == 0
    steps = checkpoint.steps_in(run.checkpoints)
    assert steps == [2, 4]
    assert (run.figures / "scores.png").is_file()
    client = MlflowClient(f"sqlite:///{run.path.parent / 'mlflow.db'}")
    run_id = json.loads((run.path / "tracking.json").read_text())["run_id"]
    name = "eval/tasks/local_piqa/score"
    by_step = client.get_metric_history(run_id, name)
    assert {point.step: point.value for point in by_step} == {
        step: results(run, step)["tasks"]["local_piqa"]["score"] for step in steps
    }
    by_tokens = client.get_metric_history(run_id, f"by_tokens/{name}")
    assert {point.step for point in by_tokens} == {step * 64 for step in steps}
    tables = json.loads(client.get_run(run_id).data.tags["mlflow.loggedArtifacts"])
    assert {"path": "evals/step-4/scores.json", "type": "table"} in tables
    path = client.download_artifacts(run_id, "evals/step-4/samples/local_piqa.json")
    table = json.loads(Path(path).read_text())
    assert table["columns"][0] == "prompt"
    assert len(table["data"]) == len(QUESTIONS)
    experiment = client.get_run(run_id).info.experiment_id
    models = client.search_logged_models([experiment])
    assert {model.name for model in models} == {f"{run.id}-step-{step}" for step in steps}
    newest = next(model for model in models if model.name.endswith("-4"))
    assert newest.tags["uri"] == str(run.checkpoints / "step-00000004")
    assert any(metric.key == name for metric in newest.metrics or [])


def test_sending_twice_stores_once(
    trained: tuple[Config, RunFolder], local: tuple[str, ...]
) -> None:
    from mlflow import MlflowClient

    _, run = trained
    assert command(run, "eval", "tracking.offline=false", *local) == 0
    client = MlflowClient(f"sqlite:///{run.path.parent / 'mlflow.db'}")
    run_id = json.loads((run.path / "tracking.json").read_text())["run_id"]
    name = "eval/tasks/local_piqa/score"
    before = len(client.get_metric_history(run_id, name))
    assert command(run, "track", "tracking.offline=false") == 0
    assert command(run, "track", "tracking.offline=false") == 0
    assert len(client.get_metric_history(run_id, name)) == before


def test_a_hugging_face_folder_goes_in_the_same_table(
    trained: tuple[Config, RunFolder],
    local: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, run = trained
    folder = tmp_path / "theirs"
    assert command(run, "export", f"folder={folder}") == 0
    overrides = (*local, f"run={folder}", "tracking.offline=true")
    assert command(run, "eval", *overrides) == 0
    assert "theirs" in capsys.readouterr().out
    (path,) = (run.path.parent / "evals").glob("theirs-*/results.json")
    theirs = json.loads(path.read_text())["tasks"]["local_piqa"]
    assert theirs["num_samples"] == len(QUESTIONS)
    assert command(run, "eval", *local) == 0
    assert '<th class="number">theirs</th>' in run.report.read_text()


def test_folders_of_one_name_stand_beside_each_other(tmp_path: Path) -> None:
    for number, folder in enumerate(("/a/step-1-hf", "/b/step-1-hf", "/b/other")):
        place = tmp_path / "evals" / str(number)
        place.mkdir(parents=True)
        results = {"name": Path(folder).name, "folder": folder}
        (place / "results.json").write_text(json.dumps(results))
    assert set(others(tmp_path)) == {"/a/step-1-hf", "/b/step-1-hf", "other"}


def test_a_checkpoint_is_not_read_with_another_corpus_tokenizer(
    trained: tuple[Config, RunFolder],
) -> None:
    config, run = trained
    found = checkpoint.at_step(run.checkpoints, STEPS)
    dataset = Dataset.open(corpus_of(run))
    assert of_checkpoint(config, found, dataset).identity
    identity = {**found.state["identity"], "tokenizer": "another"}
    other = dataclasses.replace(found, state={**found.state, "identity": identity})
    with pytest.raises(ConfigError, match="has another tokenizer than the checkpoint"):
        of_checkpoint(config, other, dataset)


def test_more_workers_than_ray_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    _require_room(4, 0)
    with pytest.raises(ConfigError, match=r"evals.workers=5: they need 5 CPU, and Ray has 4"):
        _require_room(5, 0)
    with pytest.raises(ConfigError, match="need 2 GPU"):
        _require_room(2, 1)


def test_missing_data_is_named_and_the_exit_code_says_so(
    trained: tuple[Config, RunFolder],
    local: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr("pipeline.evaluation.measure.hub_answers", lambda: False)
    _, run = trained
    both = (*local, "evals.tasks=[piqa,local_piqa]")
    assert command(run, "eval", *both) == 3
    assert "piqa (ConnectionError" in capsys.readouterr().err
    found = results(run, STEPS)
    assert list(found["tasks"]) == ["local_piqa"]
    assert "piqa" in found["skipped"]
    assert command(run, "eval", *both, "on_missing=fail") == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("evals.tasks=[local_piq]",), "did you mean local_piqa"),
        (("evals.tasks=[local_arc_easy]",), "which is not there"),
        (("evals.precision=fp4",), "evals.precision=fp4"),
        (("step=some",), "step=some"),
        (("step=3",), "no checkpoint of step 3"),
        (("run=/nowhere",), "run=/nowhere: there is no such folder"),
        (("run=file:///nowhere",), "run=/nowhere: there is no such folder"),
        (("run=/",), "holds no run (config.yaml), no checkpoint (state.json) and no model"),
        (("run=" + "0" * 32,), "no such run in"),
    ],
)
def test_a_mistake_gets_one_message_and_exit_code_2(
    trained: tuple[Config, RunFolder],
    local: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    message: str,
) -> None:
    _, run = trained
    assert command(run, "eval", *local, *overrides) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_what_reading_a_folder_needs_is_named_where_it_is_missing(
    trained: tuple[Config, RunFolder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, run = trained
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert command(run, "eval", f"run={tmp_path}") == 2
    assert "pip install 'transformers" in capsys.readouterr().err


def test_a_copy_from_a_store_that_broke_off_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = "s3://bucket/step-00000004?region=us-east-1"
    names = (checkpoint.MANIFEST, checkpoint.STATE, "model.safetensors")
    arrives: tuple[str, ...] = names[:1]

    def copy(source: str, target: str, **settings: Any) -> None:
        for name in arrives:
            (Path(target) / name).write_text(source)
        if arrives != names:
            raise OSError("the store is away")

    monkeypatch.setattr(fs, "copy_files", copy)
    with pytest.raises(ConfigError, match="the store is away"):
        targets._fetched(uri, tmp_path)
    arrives = names
    found = targets._fetched(uri, tmp_path)
    assert found.name == "step-00000004"
    assert {path.name for path in found.iterdir()} == set(names)


def test_watching_evaluates_each_new_checkpoint_until_training_has_ended(
    trained: tuple[Config, RunFolder],
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, run = trained
    watched = RunFolder(tmp_path / "watched")
    watched.checkpoints.mkdir(parents=True)
    evals = dataclasses.replace(
        config.evals, tasks=("local_piqa",), files=str(files), max_length=128, watch_seconds=0.01
    )
    config = dataclasses.replace(config, evals=evals)
    appears = [2, None, 4, None]  # what each look at the run brings
    seen: list[int] = []

    def training(_: RunFolder) -> bool:
        step = appears.pop(0) if appears else None
        if step:
            name = f"step-{step:08d}"
            (watched.checkpoints / name).symlink_to(run.checkpoints / name)
        return bool(appears)

    evaluate = evaluation.evaluate_checkpoint
    monkeypatch.setattr(evaluation, "is_training", training)
    monkeypatch.setattr(
        evaluation,
        "evaluate_checkpoint",
        lambda *args: seen.append(args[2].step) or evaluate(*args),
    )
    evaluation.follow(config, watched, corpus_of(run))
    assert seen == [2, 4]
    assert sorted(path.name for path in watched.path.iterdir()) == ["checkpoints", "evals"]


def test_in_the_recipes_precision_no_score_depends_on_what_is_computed_with_it(
    trained: tuple[Config, RunFolder],
) -> None:
    config, run = trained
    evals = dataclasses.replace(config.evals, precision="recipe")
    config = dataclasses.replace(config, evals=evals)
    dataset = Dataset.open(corpus_of(run))
    found = checkpoint.latest(run.checkpoints)
    assert found is not None
    model = targets.of_checkpoint(config, found, dataset).model
    assert model is not None
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randint(1, 300, (3 + 5 * i,), generator=generator).tolist(), [7, 8 + i])
        for i in range(8)
    ]

    def scores(batch_size: int) -> list[float]:
        found = {}
        for batch in plan_batches(pairs, batch_size, share=True):
            places = [place for group in batch for place in group.places]
            found |= dict(zip(places, score_groups(Hybrid(model), batch), strict=True))
        return [found[place][0] for place in range(len(pairs))]

    def apart() -> float:
        return max(abs(a - b) for a, b in zip(scores(1), scores(8), strict=True))

    fixed = apart()
    layers = [m for m in model.modules() if getattr(m, "input_amax", None) is not None]
    assert layers
    for layer in layers:
        layer.input_amax = None  # each batch's own amax again
    assert fixed < 1e-3
    assert apart() > 10 * max(fixed, 1e-6)


@pytest.mark.integration
@pytest.mark.usefixtures("ray_session")
def test_any_number_of_workers_gives_the_same_scores_to_the_bit(
    trained: tuple[Config, RunFolder], local: tuple[str, ...]
) -> None:
    _, run = trained
    assert command(run, "eval", "again=true", *local) == 0
    alone = (run.evals / f"step-{STEPS:08d}" / "local_piqa_samples.jsonl").read_text()
    assert command(run, "eval", "again=true", "workers=2", *local) == 0
    shared = (run.evals / f"step-{STEPS:08d}" / "local_piqa_samples.jsonl").read_text()
    assert shared == alone
