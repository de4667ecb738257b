"""The command line: fast help, Hydra's grammar, and mistakes that get an answer, not a trace."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def pipeline(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments], capture_output=True, text=True, cwd=cwd
    )


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help")])
def test_help_lists_everything_without_importing_torch_or_ray(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; sys.argv = ['pipeline', *sys.argv[1:]]\n"
        "try:\n import pipeline.cli; pipeline.cli.main()\n"
        "except SystemExit: pass\n"
        "print('HEAVY', sorted({'torch', 'ray', 'mlflow', 'numpy'} & set(sys.modules)))"
    )
    started = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert "HEAVY []" in result.stdout
    assert "12b_nvfp4" in result.stdout
    assert "precision  bf16, fp8" in result.stdout
    assert "python -m pipeline run precision=bf16" in result.stdout
    assert time.perf_counter() - started < 5  # 0.2 s on an idle machine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rnu",), "did you mean run"),
        (("run", "precison=bf16"), "precison: no such key; did you mean precision"),
        (("run", "precision=nvpf4"), "did you mean nvfp4"),
        (("run", "train.tokns=3"), "did you mean train.tokens"),
        (("run", "+train.tokns=3"), "train.tokns: no such key; did you mean tokens"),
        (("run", "+experiment=12b_nvpf4"), "did you mean 12b_nvfp4"),
        (("run", "stages=[prepare,trian]"), "no stage 'trian'; did you mean train"),
        (("run", "train.tokens=many"), "train.tokens: expected int, got 'many'"),
        (("run", "train.global_batch=17"), "not a multiple"),
        (("run", "+data.sources.code.uris=[x]"), "either builtin=... or uris"),
        (("run", "model.pattern=MX-"), "'X'"),
        (("run", "train.phases=[]"), "train.phases: empty"),
        (("run", "train.learning_rate=nan"), "train.learning_rate: must be at least"),
        (("run", "train.beta1=1.5"), "train.beta1: must be between 0 and 1"),
        (("run", "seed=-1"), "seed: must be between 0 and"),
        (("run", "evals.limit=0"), "evals.limit: must be at least 1"),
        (("run", "cluster.workers=-1"), "cluster.workers: must be at least 0"),
        (("run", "data.name=../x"), "it names a folder"),
        (("run", "model=null"), "cannot be read"),
        (("run", "data.tokenizer.eos_token=a"), "cannot end documents"),
        (("run", "cluster.address=127.0.0.1:1", "cluster.workers=2"), "no Ray cluster answers"),
        (("run", "cluster=cpu2", "cluster.workers=4096"), "4096 workers need 4096 CPU"),
        (("run", "train.phases=[{start: 0, sequence_length: -64}]"), "does not divide"),
        (("run", "tracking.uri=foo://bar", "data.holdout_fraction=0.5"), "tracking.offline=true"),
        (("eval", "run=latest", "model=tiny"), "own configuration stands"),
        (("eval",), "name the run"),
        (("data",), "say what, as data show run=latest"),
        (("data", "ta", "run=latest"), "did you mean at"),
        (("data", "at", "run=latest", "step=x"), "step=x: give a step's number"),
        (("data", "at", "run=latest", "step=3"), "there is no run in"),
        (("run", "train.fork_from=none@3"), "there is no run in"),
    ],
)
def test_a_mistake_gets_one_clear_message_and_exit_code_2(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    root = [f"root={tmp_path}"] if len(arguments) > 1 or arguments[0] == "eval" else []
    result = pipeline(*arguments, *root)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.returncode == 2


def test_the_resolved_configuration_is_printed() -> None:
    result = pipeline("run", "--cfg", "job", "--resolve", "precision=mxfp4", "seed=3")
    printed = yaml.safe_load(result.stdout)
    assert (printed["precision"]["recipe"], printed["seed"]) == ("mxfp4", 3)
    assert "${" not in result.stdout


def test_the_paper_s_run_stops_before_any_work_and_names_what_is_missing(tmp_path: Path) -> None:
    result = pipeline("run", "+experiment=12b_nvfp4", f"root={tmp_path / 'runs'}")
    assert result.returncode == 2
    for missing in ("data.sources.web", "tokenizer", "64 workers", "GPU"):
        assert missing in result.stderr
    assert not list((tmp_path / "runs").iterdir())
