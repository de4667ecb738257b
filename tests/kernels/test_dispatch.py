"""The table that chooses a GEMM's kernel, on cards that are not there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from kernels import dispatch, tune
from kernels.dispatch import Choice, Device, Problem, choose
from quant import apply_recipe, named_recipe
from quant.formats import FORMATS
from quant.gemm import BACKENDS, choose_backend, format_name
from quant.policy import Precision

CPU = Device("cpu", without_triton="Triton's kernels need CUDA, not cpu")
HOPPER = Device("cuda", (9, 0), "H100")
B200, B300, RTX = (
    Device("cuda", c, n) for c, n in (((10, 0), "B200"), ((10, 3), "B300"), ((12, 0), "RTX"))
)
NO_TRITON = Device("cuda", (10, 0), "B200", "Triton is not installed")


def problem(
    a: str = "nvfp4", b: str | None = None, rows: int = 4096, columns: int = 1024, depth: int = 512
) -> Problem:
    return Problem((a, b or a), rows, columns, (depth, depth))


@pytest.mark.parametrize(
    ("device", "asked", "backend", "kernel", "why"),
    [
        (B200, problem(), "blackwell", "cublas", "first"),
        (B300, problem(), "blackwell", "cublas", "first"),
        (RTX, problem(rows=17), "blackwell", "cublas", "first"),
        (NO_TRITON, problem(), "blackwell", "cublas", "first"),
        (B200, problem("mxfp8"), "blackwell", "cublas", "first"),
        (B200, problem("mxfp4"), "blackwell", "dot_scaled", "cublas: it takes two operands"),
        (B200, problem(columns=20), "blackwell", "dot_scaled", "N = 20 is not a multiple of 16"),
        (B200, problem(columns=18), "emulated", "torch", "N = 18 is not a multiple of 4"),
        (B200, problem(depth=48), "emulated", "torch", "R = 48 makes rows of 24 bytes"),
        (B200, problem("bf16"), "emulated", "torch", "not bf16 and bf16"),
        (B200, problem("nvfp4", "bf16"), "emulated", "torch", "not nvfp4 and bf16"),
        (B200, problem("nvfp4", "mxfp4"), "emulated", "torch", "not nvfp4 and mxfp4"),
        (B200, problem("fp8_block_free"), "emulated", "torch", "not fp8_block_free and"),
        (B200, problem("mxfp8", depth=48), "blackwell", "dot_scaled", "R = 48 is not a multiple"),
        (NO_TRITON, problem("mxfp4"), "emulated", "torch", "Triton is not installed"),
        (HOPPER, problem(), "emulated", "decode", "sm_90 has no FP4 tensor cores"),
        (HOPPER, problem("mxfp8"), "emulated", "decode", "sm_90 has no FP4 tensor cores"),
        (HOPPER, problem(depth=16), "emulated", "torch", "rows of 8 bytes"),
        (CPU, problem(), "emulated", "torch", "cpu has no FP4 tensor cores"),
        (Device("meta", without_triton="x"), problem(), "emulated", "torch", "meta has no FP4"),
    ],
    ids=str,
)
def test_what_runs_where_and_why(
    device: Device, asked: Problem, backend: str, kernel: str, why: str
):
    choice = choose(device, asked)
    assert (choice.backend, choice.kernel) == (backend, kernel)
    assert why in choice.reason


def test_cublas_is_passed_over_where_the_operands_are_padded_differently():
    choice = choose(B200, Problem(("nvfp4", "nvfp4"), 64, 64, (512, 544)))
    assert choice.kernel == "dot_scaled"
    assert "padded differently" in choice.reason


@pytest.mark.parametrize("backend", dispatch.BACKENDS)
def test_a_wish_is_kept_or_refused_with_all_reasons(backend: str):
    assert choose(B200, problem(), backend=backend).backend == backend
    with pytest.raises(ValueError, match=r"cublas: sm_90 has no FP4.*dot_scaled: sm_90"):
        choose(HOPPER, problem(), backend="blackwell")
    assert choose(HOPPER, problem(), backend="emulated").kernel == "decode"


def test_a_tune_decides_within_the_first_backend_that_takes_the_problem():
    measured = {str(problem()): tune.Entry("dot_scaled", 2, 12.0)}
    choice = choose(B200, problem(), measured)
    assert (choice.backend, choice.kernel, choice.tiling) == ("blackwell", "dot_scaled", 2)
    assert "12.0 us" in choice.reason
    assert choose(B200, problem(rows=8), measured).kernel == "cublas"
    # One that was made elsewhere names no kernel that this card lacks.
    assert choose(HOPPER, problem(), measured).kernel == "decode"
    decoded = {str(problem()): tune.Entry("torch", 0, 3.0)}
    assert choose(HOPPER, problem(), decoded).kernel == "torch"
    assert choose(B200, problem(), decoded).kernel == "cublas"


@pytest.fixture
def tunes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NVFP4_TUNE", str(tmp_path))
    return tmp_path


def test_a_tune_is_stored_by_card_and_grows(tunes: Path):
    assert tune.load("NVIDIA B200") == {}
    first, second = tune.Entry("cublas", 0, 1.5), tune.Entry("dot_scaled", 1, 2.5)
    tune.save("NVIDIA B200", {"a": first})
    file = tune.save("NVIDIA B200", {"b": second})
    assert tune.load("NVIDIA B200") == {"a": first, "b": second}
    assert tune.load("NVIDIA H100") == {}
    assert list(tunes.iterdir()) == [file]
    file.write_text("[1")
    with pytest.raises(ValueError, match="delete it"):
        tune.load("NVIDIA B200")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_that_kernels_read_alike_share_a_name(name: str):
    expected = {"nvfp4_2d": "nvfp4", "mxfp4_floor": "mxfp4", "mxfp8_floor": "mxfp8"}
    expected |= {"fp8_block": "mxfp8", "fp8_block_2d": "mxfp8"}
    assert format_name(FORMATS[name]) == expected.get(name, name)
    assert format_name(None) == "bf16"


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(48, 64, bias=False)})])


def toy(backend: str | None = None) -> Precision:
    recipe = named_recipe("nvfp4").with_blocks(first=0, last=0)
    return apply_recipe(Toy(), recipe, num_blocks=1, seed=0, backend=backend)


def test_the_table_of_a_model_names_backend_and_kernel(monkeypatch: pytest.MonkeyPatch):
    assert toy().table()[0].backend == "emulated"
    assert toy("reference").table()[0].backend == "reference"
    monkeypatch.setattr(dispatch, "describe", lambda device: B200)
    dispatch.choose_on.cache_clear()
    try:
        # K = 48 is too odd for Fprop; in Dgrad it is a number of columns, in Wgrad too.
        assert toy().table()[0].backend == "emulated/blackwell/blackwell (torch/cublas/cublas)"
        assert toy("emulated").table()[0].backend == "emulated (torch/decode/decode)"
        with pytest.raises(ValueError, match="rows of 24 bytes"):
            toy("blackwell").table()
    finally:
        dispatch.choose_on.cache_clear()


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="choose from"):
        toy("hopper")
    assert set(BACKENDS) == {"blackwell", "emulated", "reference"}


def test_a_route_away_from_fp4_tensor_cores_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tunes: Path
):
    monkeypatch.setattr(dispatch, "describe", lambda device: B200)
    dispatch.choose_on.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "kernels.dispatch"):
            for _ in range(2):
                dispatch.choose_on(torch.device("cuda"), problem(depth=48))
                dispatch.choose_on(torch.device("cuda"), problem())
    finally:
        dispatch.choose_on.cache_clear()
    warning, information = caplog.records  # once each
    assert (warning.levelname, information.levelname) == ("WARNING", "INFO")
    assert "rows of 24 bytes" in warning.message
    assert "blackwell (cublas)" in information.message


def test_a_cpu_is_decided_without_a_device():
    assert choose_backend(torch.device("cpu"), problem()) == Choice(
        "emulated", "torch", choose(CPU, problem()).reason
    )
