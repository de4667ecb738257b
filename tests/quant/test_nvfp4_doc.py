"""docs/nvfp4.md: every example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "nvfp4.md"


@pytest.mark.usefixtures("implementation")
def test_the_examples_run_in_one_session_from_top_to_bottom():
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) >= 8
    session: dict = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"example {number} of {DOCUMENT.name}", "exec"), session)
