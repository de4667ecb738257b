"""Fixtures that every test folder shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported: spinning threads make a busy machine many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden bytes, evaluation files and schemas beside the project."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no shared reference data at {folder}")
    return folder


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray for all tests that need one: starting it takes seconds."""
    from pipeline.ray_session import ray_session as session

    with session():
        yield
