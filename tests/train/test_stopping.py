"""A request to stop reaches the loop; a second one does not wait for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pipeline.train.stopping import graceful_stop, requested


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_interrupts(tmp_path: Path, number: int) -> None:
    file = tmp_path / "stop"
    with graceful_stop(file):
        assert not requested(file)
        os.kill(os.getpid(), number)
        assert requested(file)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert not requested(file)


def test_the_first_signal_asks_also_where_someone_else_has_asked(tmp_path: Path) -> None:
    file = tmp_path / "stop"
    with graceful_stop(file):
        file.touch()  # as a pod's preStop does before its SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_an_old_request_does_not_stop_a_new_start(tmp_path: Path) -> None:
    file = tmp_path / "stop"
    file.touch()
    with graceful_stop(file):
        assert not requested(file)


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with graceful_stop(tmp_path / "stop"):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
