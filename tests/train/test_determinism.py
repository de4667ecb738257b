"""`train.deterministic`: its switches are set before anything is built, and listed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline.runs import RunFolder
from pipeline.train.determinism import ENVIRONMENT, make_deterministic
from pipeline.train.driver import _train_worker
from tests.train.tiny import configuration, corpus, same_bits, start, tensors_of, train


@pytest.fixture(autouse=True)
def _switches_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "as before")
    sdp, benchmark = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(sdp)
    torch.backends.cudnn.benchmark = benchmark


def test_every_switch_is_set_and_listed() -> None:
    torch.backends.cudnn.benchmark = True
    listed = make_deterministic()
    assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cudnn.benchmark
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert len(listed) == len(ENVIRONMENT) + 3
    for library in ("CUBLAS", "NCCL", "MAMBA", "CAUSAL_CONV1D", "cudnn_sdp"):
        assert any(library in name for name in listed), library


def test_an_operation_without_a_deterministic_form_stops() -> None:
    places, values = torch.tensor([0, 0]), torch.tensor([1.0, 2.0])
    torch.zeros(3).put_(places, values)
    make_deterministic()
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(3).put_(places, values)


@pytest.mark.slow
def test_a_worker_trains_with_them_set_and_its_bits_are_the_same_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = corpus(tmp_path / "corpus")
    config = configuration(tmp_path, 3, deterministic=True)
    plain, careful = start(config, "plain"), start(config, "careful")
    train(config, plain, dataset)
    assert not torch.are_deterministic_algorithms_enabled()
    summary = _train_worker(
        {"config": config.to_dict(), "run": str(careful.path), "dataset": str(dataset)}
    )
    assert summary["steps"] == 3
    assert torch.are_deterministic_algorithms_enabled()
    assert "torch.use_deterministic_algorithms" in capsys.readouterr().out
    assert same_bits(tensors_of(plain), tensors_of(RunFolder(careful.path)))
