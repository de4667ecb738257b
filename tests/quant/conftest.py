"""Fixtures of the quantizers' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels import cpu
from quant.backend import backend


@pytest.fixture(params=["reference", "cpu"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test on plain torch and on the compiled kernels."""
    if request.param == "cpu" and not cpu.available():
        pytest.skip(f"no compiled CPU kernels: {cpu.reason()}")
    with backend(request.param):
        yield request.param
