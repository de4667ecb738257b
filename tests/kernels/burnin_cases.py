"""The burn-in's checks in the process in which Triton interprets, on CPU tensors."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from kernels import dispatch
from kernels.burnin import checks
from kernels.dispatch import Device
from quant.backend import backend
from tests.kernels import interpreted_dot


def checked(name: str, **options: Any) -> str:
    """A check's text, as on a B200."""
    interpreted_dot.mend()
    described, gemm = dispatch.describe, checks.gemm
    checks.gemm = lambda a, b, backend: gemm(a, b, "reference")
    dispatch.describe = lambda device: Device("cuda", (10, 0), "B200")
    dispatch.choose_on.cache_clear()
    try:
        return getattr(checks, name)(torch.device("cpu"), **options)
    finally:
        dispatch.describe, checks.gemm = described, gemm
        dispatch.choose_on.cache_clear()


def timed_quantizers() -> dict[str, float]:
    """What `benchmarks/kernels_gpu.py` times, run once each on a small matrix: bytes by name."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels_gpu.py"
    spec = importlib.util.spec_from_file_location("kernels_gpu", path)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules["kernels_gpu"] = benchmark
    spec.loader.exec_module(benchmark)
    with backend("triton"):
        candidates = benchmark.quantizers(torch.randn(32, 64).bfloat16())
        for _, _, call in candidates:
            call()
    return {name: moved for name, moved, _ in candidates}
