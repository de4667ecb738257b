"""The compiled CPU kernels: equal to plain torch to the byte, and absent without harm."""

from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import cpu
from quant.backend import backend
from quant.copies import quantize_rowcol
from quant.formats import FORMATS, NVFP4, Format
from quant.hadamard import rht_transpose
from quant.quantize import amax_of, dequantize, nonfinite_count, quantize
from quant.rounding import Copy, Role, RoundingKey

pytestmark = pytest.mark.slow

KEY = RoundingKey(2**63 + 5, 2, 2**32 - 1, 70_000, Role.GRADIENT, Copy.COLUMN)

needs_kernel = pytest.mark.skipif(not cpu.available(), reason=f"no CPU kernels: {cpu.reason()}")


def inputs(kind: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(len(kind) + sum(shape))
    if kind == "any BF16 bits":
        bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int32)
        return bits.to(torch.int16).view(torch.bfloat16)
    if kind == "any FP32 bits":
        return (
            torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int64)
            .to(torch.int32)
            .view(torch.float32)
        )
    x = torch.randn(shape, generator=generator)
    if kind == "wide":
        x *= torch.exp2(torch.randint(-60, 60, shape, generator=generator).float())
    if kind == "subnormal":
        x *= 1e-38
    return {"FP16": x.half(), "FP32": x, "subnormal": x}.get(kind, x.bfloat16())


KINDS = ["BF16", "FP16", "FP32", "wide", "subnormal", "any BF16 bits", "any FP32 bits"]
# Whole blocks, one element more, rests of each kind, more columns than one step holds.
SHAPES = [(64, 256), (1, 2), (3, 18), (130, 82), (17, 1030), (2, 2100)]


def raw(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def equal_but_for_nan(a: Tensor, b: Tensor) -> bool:
    """Bits equal, where NaN of any payload equals NaN."""
    finite = ~a.isnan()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(raw(a[finite]), raw(b[finite]))


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
def test_quantizing_equals_plain_torch(kind: str, format: Format):
    ways: list[dict] = [{}]
    if format.element == "e2m1":
        stochastic = {"rounding": "stochastic", "key": KEY, "offset": 12_345}
        ways += [stochastic] + [{**stochastic, "guard": True}] * format.has_global_scale
    for shape in SHAPES:
        x = inputs(kind, shape)
        for options in ways:
            made = {}
            for name in ("reference", "cpu"):
                with backend(name):  # type: ignore[arg-type]
                    made[name] = quantize(x, format, **options)
            a, b = made["reference"], made["cpu"]
            assert torch.equal(a.codes, b.codes), shape
            assert torch.equal(raw(a.scales), raw(b.scales)), shape
            assert a.global_scale == b.global_scale


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
def test_dequantizing_equals_plain_torch(kind: str, format: Format):
    for shape in SHAPES:
        q = quantize(inputs(kind, shape), format)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for outer in (True, False):
                with backend("reference"):
                    expected = dequantize(q, dtype, global_scale=outer)
                with backend("cpu"):
                    values = dequantize(q, dtype, global_scale=outer)
                assert equal_but_for_nan(values, expected), (shape, dtype)


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [16, 32])
def test_the_transform_equals_plain_torch(kind: str, size: int):
    for shape in SHAPES:
        x = inputs(kind, shape)
        with backend("reference"):
            expected = rht_transpose(x, size=size)
        with backend("cpu"):
            assert equal_but_for_nan(rht_transpose(x, size=size), expected), shape


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_equal_plain_torch(kind: str):
    for shape in (*SHAPES, (0, 16), (5, 70_000)):
        x = inputs(kind, shape)
        found = {}
        for name in ("reference", "cpu"):
            with backend(name):  # type: ignore[arg-type]
                found[name] = amax_of(x), nonfinite_count(x)
        assert found["reference"] == found["cpu"]


@needs_kernel
def test_bytes_do_not_depend_on_the_number_of_threads():
    x = inputs("BF16", (300, 514))
    threads = torch.get_num_threads()
    made = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            with backend("cpu"):
                made.append(quantize_rowcol(x, NVFP4, NVFP4, column_rht=True))
    finally:
        torch.set_num_threads(threads)
    for other in made[1:]:
        assert other.row is not None
        assert other.column is not None
        assert torch.equal(other.row.codes, made[0].row.codes)
        assert torch.equal(other.column.codes, made[0].column.codes)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder and no library loaded; both undone after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu._load.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    cpu._load.cache_clear()


def test_without_a_compiler_torch_does_the_work_and_one_warning_says_so(
    unloaded: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    x = inputs("BF16", (32, 64))
    with backend("reference"):
        expected = quantize(x, NVFP4)
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(quantize(x, NVFP4).codes, expected.codes)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "no C++ compiler" in caplog.text
    assert not cpu.available()
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"), backend("cpu"):
        pass


def test_a_compiler_that_fails_is_reported_with_its_own_words(
    unloaded: Path, monkeypatch: pytest.MonkeyPatch
):
    script = unloaded / "c++"
    script.write_text("#!/bin/sh\necho 'no such flag: frobnicate' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(unloaded))
    assert not cpu.available()
    assert "frobnicate" in cpu.reason()


@needs_kernel
def test_the_library_is_built_once_and_found_again(unloaded: Path):
    first = cpu._build()
    modified = first.stat().st_mtime_ns
    assert first.is_relative_to(unloaded)
    assert cpu._build() == first
    assert first.stat().st_mtime_ns == modified
    assert [p.name for p in first.parent.iterdir()] == [first.name]


@needs_kernel
def test_a_cache_that_cannot_be_written_does_not_stop_the_build(
    unloaded: Path, monkeypatch: pytest.MonkeyPatch
):
    blocked = unloaded / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert cpu.available()


def _build_in(folder: str) -> str:
    import os

    os.environ["XDG_CACHE_HOME"] = folder
    cpu._load.cache_clear()
    return cpu._build().name


@needs_kernel
@pytest.mark.slow
def test_processes_may_race_to_build(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        names = pool.map(_build_in, [str(tmp_path)] * 3)
    assert len(set(names)) == 1
    assert len(list((tmp_path / "nvfp4-pretrain").iterdir())) == 1


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="'fast'"), backend("fast"):  # type: ignore[arg-type]
        pass
