"""What a run says before it trains: which kernels its GEMMs take on the device that trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import dispatch
from kernels.dispatch import Device
from pipeline.config import Config
from pipeline.data.shards import Dataset
from pipeline.lineage import schedule_of
from pipeline.stages import describe_training
from tests.train.tiny import configuration, corpus

B200 = Device("cuda", (10, 0), "B200")


@pytest.fixture
def on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """A run on a GPU, which the tables take for a B200."""
    monkeypatch.setenv("NVFP4_TUNE", str(tmp_path))
    monkeypatch.setattr(dispatch, "describe", lambda device: B200 if device.type == "cuda" else CPU)
    dispatch.choose_on.cache_clear()
    config = configuration(tmp_path, 2)
    yield dataclasses.replace(
        config, cluster=dataclasses.replace(config.cluster, gpus_per_worker=1)
    )
    dispatch.choose_on.cache_clear()


CPU = dispatch.describe(torch.device("cpu"))


def backends(config: Config, folder: Path) -> tuple[set[str], str]:
    """Of the quantized linears; and the printed line."""
    described: dict[str, Any] = describe_training(
        config, Dataset.open(corpus(folder)), schedule_of(config, None)
    )
    table = described["results"]["precision_table"]
    line = next(line for line in described["lines"] if line.startswith("  precision"))
    return {row["backend"] for row in table if "nvfp4" in row["fprop"]}, line


def test_the_table_is_that_of_the_card_not_of_the_driver_s_empty_model(
    on_a_gpu: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found, line = backends(on_a_gpu, tmp_path / "data")
    assert found == {"blackwell (cublas)"}
    assert "(blackwell (cublas))" in line


def test_a_driver_without_a_card_leaves_it_to_the_workers(
    on_a_gpu: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, line = backends(on_a_gpu, tmp_path / "data")
    assert found == {"chosen by the workers"}
    assert "chosen by the workers" in line
