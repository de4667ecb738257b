"""Fixtures that every test folder shares."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden bytes, evaluation files and schemas beside the project."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no shared reference data at {folder}")
    return folder
