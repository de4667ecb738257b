"""A finished run of the shortened default, made once a session."""

from __future__ import annotations

import pytest

from tests.integration.runs import SHORT, Run, pipeline, run_folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("runs")
    result = pipeline(root, "run", *SHORT)
    assert result.returncode == 0, result.stdout + result.stderr
    return Run(run_folder(root), result.stderr + result.stdout)
