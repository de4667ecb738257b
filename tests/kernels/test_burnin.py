"""The burn-in without a card: verdicts, what it finds in wrong results, and interpreted checks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.burnin import curve, judge
from kernels.burnin.checks import checks
from kernels.burnin.verdicts import (
    CheckError,
    NotCheckedError,
    Verdict,
    exit_code,
    line,
    run,
    summary,
)
from quant.rounding import round_e2m1_stochastic

CPU = torch.device("cpu")
Run = Callable[..., Any]


def failing(device: torch.device) -> str:
    raise CheckError("bytes differ")


def crashing(device: torch.device) -> str:
    raise RuntimeError("device lost\nwith a long trace")


def skipping(device: torch.device) -> str:
    raise NotCheckedError("one card")


def test_every_check_has_a_verdict_and_none_ends_the_program():
    seen: list[Verdict] = []
    todo = [("a", lambda d: "fine"), ("b", failing), ("c", crashing), ("d", skipping)]
    verdicts = run(todo, CPU, report=seen.append)
    assert seen == verdicts
    assert [(v.status, v.detail) for v in verdicts] == [
        ("ok", "fine"),
        ("FAILED", "bytes differ"),
        ("FAILED", "RuntimeError: device lost"),
        ("skipped", "one card"),
    ]
    assert "bytes differ" in line(verdicts[1])


def test_no_check_starts_after_the_budget():
    times = iter([0.0, 1.0, 9.0, 11.0])
    todo = [("a", lambda d: "fine"), ("b", lambda d: pytest.fail("it started"))]
    verdicts = run(todo, CPU, budget=10, clock=lambda: next(times))
    assert verdicts[0] == Verdict("a", "ok", "fine", 8.0)
    assert verdicts[1].status == "skipped"


@pytest.mark.parametrize(
    ("statuses", "code"),
    [(["ok", "skipped"], 0), (["ok", "FAILED"], 1), (["skipped"], 1), ([], 1)],
)
def test_a_card_is_fit_if_something_ran_and_nothing_failed(statuses: list[Any], code: int):
    verdicts = [Verdict("x", status, "") for status in statuses]
    assert exit_code(verdicts) == code
    assert ("is not fit" in summary(verdicts)) == bool(code)


@pytest.mark.slow
def test_without_a_card_it_says_so_and_fails():
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    command = [sys.executable, "-m", "kernels.burnin"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "no CUDA device" in ended.stderr
    assert not ended.stdout


def test_one_wrong_byte_is_found_and_named():
    a = torch.arange(10, dtype=torch.uint8)
    assert judge.same_bytes("codes", a, a.clone()) == 10
    b = a.clone()
    b[7] = 0x55
    with pytest.raises(CheckError, match="codes: 1 of 10 bytes differ, the first at 7: 0x55"):
        judge.same_bytes("codes", b, a)
    with pytest.raises(CheckError, match="in place of"):
        judge.same_bytes("codes", a[:3], a)


@pytest.mark.parametrize("taken", [(0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 1, 0, 2)])
def test_the_order_of_the_hardware_s_random_bytes_is_found_and_mended(taken: tuple[int, ...]):
    """A model of the instruction: element e rounds with byte `taken[e]` of its operand."""
    generator = torch.Generator().manual_seed(0)
    y = torch.rand(512, 4, generator=generator) * 12 - 6
    ours = torch.randint(0, 256, (512, 4), generator=generator, dtype=torch.uint8)

    def hardware(selector: int) -> torch.Tensor:
        operand = ours[:, [selector >> 4 * j & 15 for j in range(4)]]
        return round_e2m1_stochastic(y, operand[:, taken])

    selector = 0x3120
    (order,) = judge.byte_orders(hardware(selector), y, ours)
    mended = judge.mended_selector(selector, order)
    assert judge.byte_orders(hardware(mended), y, ours) == [(0, 1, 2, 3)]
    assert torch.equal(hardware(mended), round_e2m1_stochastic(y, ours))


def test_codes_that_no_order_explains():
    y = torch.full((8, 4), 0.75)
    random = torch.zeros(8, 4, dtype=torch.uint8)
    assert judge.byte_orders(torch.full((8, 4), 7, dtype=torch.uint8), y, random) == []


def test_peaks_are_judged_by_the_card():
    assert "90% and 80%" in judge.judge_peaks("NVIDIA B200", 7.2e12, 1.8e15)
    with pytest.raises(CheckError, match="throttled"):
        judge.judge_peaks("NVIDIA H100 80GB HBM3", 3.0e12, 0.4e15)
    with pytest.raises(CheckError):
        judge.judge_peaks("NVIDIA H200", 3.0e12, 0.9e15)
    assert "no figures" in judge.judge_peaks("NVIDIA RTX PRO 6000", 1.0e12, 1e14)


def test_sums_are_judged_by_their_bound():
    wanted, bound = torch.ones(2, 2), torch.full((2, 2), 0.5)
    assert judge.judge_sums("x", wanted + 0.25, wanted, bound) == 0.5
    assert judge.judge_sums("x", wanted, wanted, torch.zeros(2, 2)) == 0
    for wrong in (wanted + 0.75, wanted * float("nan")):
        with pytest.raises(CheckError, match="order of addition"):
            judge.judge_sums("x", wrong, wanted, bound)


def test_curves_are_the_same_training_or_not():
    cpu = [6.0 - 0.01 * step for step in range(200)]
    assert "200 steps" in judge.judge_curves([1.001 * x if x < 5.9 else x for x in cpu], cpu)
    assert "120 steps" in judge.judge_curves(cpu, cpu[:120])
    with pytest.raises(CheckError, match="allowed"):
        judge.judge_curves([x * (1.05 if x < 5 else 1) for x in cpu], cpu)
    with pytest.raises(CheckError, match="allowed"):
        judge.judge_curves([cpu[0] + 0.1, *cpu[1:]], cpu)
    with pytest.raises(CheckError, match="not finite"):
        judge.judge_curves([float("nan"), *cpu[1:]], cpu)
    with pytest.raises(NotCheckedError, match="200 and 3 steps"):
        judge.judge_curves(cpu, cpu[:3])


def test_losses_are_read_from_a_run_s_metrics(tmp_path: Path):
    folder = tmp_path / "runs" / "card-000"
    folder.mkdir(parents=True)
    records = [{"kind": "start", "metrics": {}}] + [
        {"kind": "train", "metrics": {"train/loss": loss}} for loss in (6.0, 5.5)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert curve.losses(tmp_path, "card") == [6.0, 5.5]
    assert curve.losses(tmp_path, "cpu") == []


def test_the_page_names_each_check_once():
    names = [name for name, _ in checks()]
    assert len(set(names)) == len(names)
    assert "byte order of cvt.rs" in names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "options"),
    [
        ("statistics", {"shape": (18, 64)}),
        ("copies", {"options": {"column_rht": True}, "shape": (18, 64)}),
        ("weights", {"shape": (16, 32)}),
        ("values", {"shape": (3, 64)}),
        ("products", {"kernel": "dot_scaled", "shapes": ((17, 32, 64),)}),
        ("products", {"kernel": "decode", "shapes": ((17, 32, 64),)}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_the_checks_pass_in_the_interpreter(interpreted: Run, check: str, options: dict[str, Any]):
    pytest.importorskip("triton")
    assert interpreted("tests.kernels.burnin_cases:checked", check, **options)


@pytest.mark.slow
def test_a_linear_on_this_machine_is_the_oracle_s():
    from kernels.burnin.oracle import compare_linear

    assert "values" in compare_linear(CPU, (24, 32, 48))


@pytest.mark.slow
def test_two_steps_on_this_machine_are_the_oracle_s_to_the_bit(monkeypatch: pytest.MonkeyPatch):
    from kernels.burnin.oracle import SLACK, compare_steps

    assert "two steps" in compare_steps(CPU)
    # What a card's own order of sums may do passes; a scale that is wrong does not.
    from quant import linear

    plain = linear.gemm
    monkeypatch.setattr(linear, "gemm", lambda *args: plain(*args) * 1.01)
    with pytest.raises(CheckError, match="y of"):
        compare_steps(CPU, SLACK)


@pytest.mark.slow
def test_two_equal_steps_of_a_hybrid_are_equal_here():
    from kernels.burnin.checks import same_step

    assert "none all zero" in same_step(CPU, tokens=64)


# benchmarks/kernels_gpu.py


@pytest.fixture(scope="module")
def benchmark() -> Any:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels_gpu.py"
    spec = importlib.util.spec_from_file_location("kernels_gpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernels_gpu"] = module
    spec.loader.exec_module(module)
    return module


def test_a_row_is_a_share_of_what_was_measured(benchmark: Any):
    row = benchmark.memory_row("amax_rht", 1e-3, 4e9, 8e12)
    assert (row.microseconds, row.rate, row.unit, row.share) == (1000.0, 4.0, "TB/s", 0.5)
    row = benchmark.gemm_row("g", 1e-3, (1000, 1000, 1000), 1e12)
    assert (row.rate, row.unit, row.share) == (2.0, "TFLOP/s", 2.0)


def test_a_peer_that_fails_or_comes_too_late_is_left_out_by_name(benchmark: Any):
    def broken() -> None:
        raise RuntimeError("does not compile")

    clock = iter([0.0, 0.0, 5.0])
    rows, left_out = benchmark.timed(
        [("a", 8.0, lambda: None), ("b", 8.0, broken), ("c", 8.0, lambda: None)],
        copy=16.0,
        end=1.0,
        time_of=lambda call: call() or 0.5,
        clock=lambda: next(clock),
    )
    assert [(row.name, row.share) for row in rows] == [("a", 1.0)]
    assert left_out == ["b: RuntimeError: does not compile", "c: the time was over"]


def test_ratios_name_only_what_was_measured(benchmark: Any):
    rows = [
        benchmark.memory_row("row_nearest", 1e-3, 1e9, 1e12),
        benchmark.memory_row("row_nearest_torch_compile", 3e-3, 1e9, 1e12),
        benchmark.memory_row("weight_16x16", 1e-3, 1e9, 2e12),
        benchmark.gemm_row("x", 1e-3, (1000, 1000, 1000), 1e12),
    ]
    assert benchmark.ratios(rows) == {
        "weight_16x16_share": 0.5,
        "row_nearest_vs_row_nearest_torch_compile": 3.0,
        "best_gemm_vs_bf16": 2.0,
    }
    assert benchmark.ratios([]) == {}


def test_the_report_is_a_table_or_one_object(benchmark: Any, capsys: pytest.CaptureFixture[str]):
    rows = [benchmark.gemm_row("nvfp4", 1e-3, (1000, 1000, 1000), 1e12).__dict__]
    result = {"machine": "B200", "rows": rows, "ratios": {"a": 1.0}, "left_out": ["c: late"]}
    benchmark.report(result, as_json=True)
    assert json.loads(capsys.readouterr().out) == result
    benchmark.report(result, as_json=False)
    assert "left out: c: late" in capsys.readouterr().out


@pytest.mark.slow
def test_what_is_timed_runs_and_names_the_bytes_that_move(interpreted: Run):
    moved = interpreted("tests.kernels.burnin_cases:timed_quantizers")
    assert moved["amax_rht"] == 2 * 32 * 64
    assert moved["row_and_rht_column"] == 32 * 64 * (2 + 2 * 4.5 / 8)
    assert "whole_row_and_rht_column" in moved
