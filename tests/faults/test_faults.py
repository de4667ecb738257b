"""Two of the many kills that `python -m tests.faults` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness import Case, Moment, differences

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.parametrize(("ray", "target"), [(False, "process"), (True, "worker")])
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path, ray: bool, target: str) -> None:
    undisturbed, killed = Case(tmp_path, "undisturbed", ray), Case(tmp_path, "killed", ray)
    assert undisturbed.run([]) == []
    kills = killed.run([(target, Moment(steps_on=60, saving=False))])
    assert [kill.target for kill in kills] == [target]
    assert kills[0].replayed >= 1
    assert differences(killed, undisturbed) == []
