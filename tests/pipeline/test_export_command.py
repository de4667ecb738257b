"""`python -m pipeline export`: what it prints, what MLflow keeps, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.runs import RunFolder
from tests.pipeline.exported import STEPS, assert_refused, command, trained_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RunFolder]:
    return trained_run(tmp_path_factory.mktemp("runs"))


def test_it_writes_the_folder_and_prints_files_exceptions_and_the_check(
    trained: tuple[Config, RunFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = trained
    target = tmp_path / "out"
    assert command(run, "export", "format=nvfp4-modelopt", f"folder={target}") == 0
    printed = capsys.readouterr().out
    for line in (
        f"run {run.id}, step {STEPS}, as nvfp4-modelopt",
        "model.safetensors",
        "packed: 8 linears; in BF16: 1",
        "trained in bf16: lm_head",
        "in_proj: rows 96..97 (dt) trained in BF16",
        "equal to the bit",
        f"export   {target}",
    ):
        assert line in printed
    assert (target / "hf_quant_config.json").is_file()


def test_mlflow_keeps_the_record_and_the_place(trained: tuple[Config, RunFolder]) -> None:
    from mlflow import MlflowClient

    _, run = trained
    assert command(run, "export", "tracking.offline=false") == 0
    client = MlflowClient(f"sqlite:///{run.path.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("nvfp4-pretrain")
    assert experiment is not None
    (logged,) = client.search_runs([experiment.experiment_id])
    folder = run.exports / f"step-{STEPS:08d}-hf"
    assert logged.data.tags[f"export.hf.step-{STEPS}"].startswith(f"{folder} (")
    (artifact,) = client.list_artifacts(logged.info.run_id, f"exports/{folder.name}")
    assert artifact.path.endswith("export.json")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("fromat=hf",), "fromat: no such key"),
        (("format=onnx",), "format=onnx"),
        (("step=3",), "no checkpoint of step 3"),
        (("shard_bytes=0",), "export.shard_bytes: must be at least"),
        (("model=tiny",), "own configuration stands"),
        (("calibration=/none", "format=nvfp4-modelopt"), "/none cannot be read"),
        (("calibration=/none",), "format=hf has no activation scales"),
    ],
)
def test_a_mistake_gets_one_message_and_exit_code_2(
    trained: tuple[Config, RunFolder],
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    message: str,
) -> None:
    _, run = trained
    assert_refused(run, "export", overrides, message, capsys)
