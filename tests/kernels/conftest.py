"""Fixtures of the Triton kernels' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kernels import interpreter


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Calls `run("module:function", ...)` in a process in which Triton interprets its kernels."""
    pytest.importorskip("triton")
    with interpreter.pool() as executor:
        yield interpreter.runner(executor)
