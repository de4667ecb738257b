"""Every second counts as one kind; speeds and stragglers are what their definitions say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.config import ClusterConfig, HardwareConfig
from pipeline.train import clock
from pipeline.train.clock import KINDS, Clock, memory, speed
from pipeline.train.metrics import final_records
from pipeline.train.optim import build_optimizer
from pipeline.train.trainable import build_trainable
from tests.train.tiny import configuration, corpus, start, train

CPU = torch.device("cpu")
NOTHING = dict.fromkeys(KINDS, 0.0)


def test_all_time_is_of_the_kind_that_was_entered_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    counted = Clock(CPU)
    for kind, seconds in (("data", 2), ("forward", 3), ("backward", 5), ("forward", 7)):
        counted.enter(kind)
        now[0] += seconds
    assert counted.take() == {**NOTHING, "data": 2, "forward": 10, "backward": 5}
    now[0] += 4  # goes on as what it was
    assert counted.take() == {**NOTHING, "forward": 4}
    assert counted.take() == NOTHING


def test_shares_of_time_are_of_all_that_passed_and_speed_is_a_device_s() -> None:
    config = configuration(Path(), 2)
    by_kind = {**NOTHING, "data": 1.0, "backward": 3.0}
    values = speed(config, 0.5, 640, 16, by_kind, by_rank=[0.1, 0.1])
    shares = {name: value for name, value in values.items() if "share" in name}
    assert shares == {f"speed/share_{kind}": seconds / 4 for kind, seconds in by_kind.items()}
    assert values["speed/tokens_per_second_per_device"] == 640 / 0.5 / 2


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    values = speed(configuration(Path(), 2), 1.0, 64, 16, NOTHING, by_rank=[2.0, 2.0, 5.0, 1.9])
    assert values["speed/slowest_rank"] == 2
    assert values["speed/slowest_over_median"] == 2.5
    alone = speed(configuration(Path(), 2), 1.0, 64, 16, NOTHING, by_rank=[2.0])
    assert not any("slowest" in name for name in alone)


def test_utilization_is_three_forward_passes_over_the_dense_bf16_peak() -> None:
    gpu = HardwareConfig("any", (10, 0), 2.0, 0, 0, 100, 1, 1, 1, 1)  # 2 TFLOPS in BF16
    cluster = ClusterConfig(workers=2, gpus_per_worker=1, hardware=gpu)
    config = replace(configuration(Path(), 2), cluster=cluster)
    forward = clock.flops_per_token(build_trainable(config, CPU).model.config, 16)["total"]
    values = speed(config, 0.25, 100, 16, NOTHING, by_rank=[1.0, 1.0])
    expected = 3 * forward * 100 / 0.25 / (2 * 2e12)
    assert values["speed/mfu_of_bf16_peak"] == pytest.approx(expected, rel=1e-12)


def test_memory_is_told_by_category() -> None:
    config = configuration(Path(), 2, reproducible=True)
    trainable = build_trainable(config, CPU)
    optimizer = build_optimizer(trainable.model, config.train)
    parameters = sum(p.numel() for p in trainable.model.parameters())
    before = memory(trainable, optimizer, CPU)
    assert before["memory/weights"] == 4 * parameters
    assert before["memory/optimizer"] == before["memory/gradient_sums"] == 0
    trainable.reduction.backward(sum(p.sum() for p in trainable.model.parameters()), last=True)
    trainable.reduction.finish()
    optimizer.step()
    after = memory(trainable, optimizer, CPU)
    steps = 4 * len(list(trainable.model.parameters()))
    assert after["memory/optimizer"] == 8 * parameters + steps
    assert after["memory/gradient_sums"] == 8 * parameters
    assert after["memory/peak"] >= after["memory/weights"] + after["memory/optimizer"]


def test_a_run_s_shares_add_up_and_name_where_its_time_went(tmp_path: Path) -> None:
    config = configuration(tmp_path, 4, validate_every_tokens=1, checkpoint_every_tokens=1)
    run = start(config, "run")
    train(config, run, corpus(tmp_path / "corpus"))
    records = [r["metrics"] for r in final_records(run.metrics) if r["kind"] == "speed"]
    assert len(records) == 4
    for values in records:
        assert sum(v for n, v in values.items() if "share" in n) == pytest.approx(1)
        assert values["speed/share_forward"] > 0
        assert values["speed/share_backward"] > values["speed/share_sums"] > 0
    for values in records[1:]:  # what came after the step before
        assert values["speed/share_validation"] > 0
        assert values["speed/share_checkpoint"] > 0
