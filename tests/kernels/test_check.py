"""What the compiler makes of the kernels stays as good as `figures.json` says, on every target.

The figures are those of a minor version of Triton: its compiler and its `ptxas` decide them. After
a change for the better, `python -m tests.kernels.test_check` writes those of the present one anew.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from kernels import check

pytestmark = pytest.mark.slow

FIGURES = Path(__file__).with_name("figures.json")
TOLERANCE = 1.05
# Compiling takes seconds a kernel: all of them for one target, the largest for the others.
OTHERS = ("rowcol RNE+RNE", "rowcol SR+SR", "weight 16x16")


def version() -> str:
    """Of the installed Triton, such as 3.8."""
    return ".".join(importlib.metadata.version("triton").split(".")[:2])


def rows(*arguments: str) -> list[dict[str, Any]]:
    """Rows of `kernels.check --json`, in a process of its own: this one may be interpreting."""
    command = [sys.executable, "-m", "kernels.check", "--json", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1), run.stderr
    return json.loads(run.stdout)["rows"]


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    return rows("--targets", "100") + rows("--targets", "90,103,120", *OTHERS)


def test_nothing_spills_and_every_instruction_is_there(measured: list[dict[str, Any]]):
    for row in measured:
        assert not row["problems"], (row["kernel"], row["target"], row["problems"])
        assert row["stack_bytes"] == row["spill_bytes"] == 0
        assert row["required_instructions_present"]


@pytest.mark.parametrize("mistake", [("rowcoll",), ("--targets", "91"), ("--targets", "new")])
def test_a_check_of_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mistake: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check", *mistake])
    with pytest.raises(SystemExit) as end:
        check.main()
    assert end.value.code == 2
    assert mistake[-1] in capsys.readouterr().err


def test_no_figure_got_worse(measured: list[dict[str, Any]]):
    figures = json.loads(FIGURES.read_text())[version()]
    for row in measured:
        committed = figures.get(row["kernel"], {}).get(str(row["target"]))
        assert committed, f"no committed figure for {row['kernel']} on sm_{row['target']}"
        assert row["instructions_per_element"] <= TOLERANCE * committed, (row, committed)


def test_the_goals_are_met(measured: list[dict[str, Any]]):
    per_element = {
        row["kernel"]: row["instructions_per_element"] for row in measured if row["target"] == 100
    }
    assert per_element["rowcol RNE+RNE"] <= 16
    assert per_element["rowcol SR+SR"] <= 24
    assert per_element["weight 16x16"] <= 33.6 / 2  # torchao's, measured in the same way


def write_figures() -> None:
    """Write this version's part of `figures.json`, from all kernels on all targets."""
    figures: dict[str, dict[str, float]] = {}
    stored = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for row in rows():
        figures.setdefault(row["kernel"], {})[str(row["target"])] = row["instructions_per_element"]
    FIGURES.write_text(json.dumps(stored | {version(): figures}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write_figures()
