"""Runs a study: each run is `python -m pipeline run name=...` in a process of its own.

What is finished is left alone, what was interrupted goes on (that is what a name does), and a run
that fails is reported while the others go on. Each process writes its own log.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from pipeline.cli import INCOMPLETE, TRY_AGAIN
from pipeline.config import PermanentError
from pipeline.runs import RunFolder
from pipeline.study.plan import StudyRun


def is_finished(root: Path, run: StudyRun) -> bool:
    """Whether all stages of a run are done."""
    results = RunFolder(root / run.name).results
    return results.is_file() and json.loads(results.read_text()).get("status") == "finished"


def pipeline_run(run: StudyRun) -> list[str]:
    """The command that trains a run, or goes on with it."""
    return [sys.executable, "-m", "pipeline", "run", *run.overrides]


def run_all(
    runs: Sequence[StudyRun],
    root: Path,
    logs: Path,
    parallel: int,
    command: Callable[[StudyRun], list[str]] = pipeline_run,
) -> None:
    """Bring every run to its end, `parallel` at a time, forks after their trunks.

    Raises:
        KeyboardInterrupt: interrupted; the runs have written checkpoints, and another call goes on.
        PermanentError: some runs failed; the message names them and their logs.
    """
    logs.mkdir(parents=True, exist_ok=True)
    finished = {run.name for run in runs if is_finished(root, run)}
    todo = [run for run in runs if run.name not in finished]
    print(f"study: {len(runs)} runs, {len(finished)} of them finished", flush=True)
    failed: dict[str, str] = {}
    running: dict[Future[int], StudyRun] = {}
    processes = _Processes()
    with ThreadPoolExecutor(parallel) as pool:
        try:
            while todo or running:
                ready = [run for run in todo if run.trunk is None or run.trunk in finished]
                for run in ready[: parallel - len(running)]:
                    todo.remove(run)
                    running[pool.submit(processes.run, command(run), logs / f"{run.name}.log")] = (
                        run
                    )
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    run, code = running.pop(future), future.result()
                    if code == TRY_AGAIN:
                        raise KeyboardInterrupt
                    if code not in (0, INCOMPLETE):  # the latter: tasks whose data are not here
                        failed[run.name] = f"exit code {code}, see {logs / run.name}.log"
                    else:
                        finished.add(run.name)
                    how = failed.get(run.name, "done")
                    print(f"study: {run.name}: {how}; {len(todo) + len(running)} to go", flush=True)
                for run in [item for item in todo if item.trunk in failed]:
                    todo.remove(run)
                    failed[run.name] = f"its trunk {run.trunk} failed"
        except BaseException:
            processes.end()  # or the pool would wait until they have trained to their ends
            raise
    if failed:
        lines = "\n".join(f"  {name}: {how}" for name, how in failed.items())
        raise PermanentError(f"{len(failed)} runs of the study failed:\n{lines}")


class _Processes:
    """The processes of the runs, so that all of them can be told to stop."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._ended = False

    def run(self, command: list[str], log_file: Path) -> int:
        """Start one and wait for it; its exit code."""
        started = time.perf_counter()
        with log_file.open("ab") as log:
            with self._lock:
                if self._ended:
                    return TRY_AGAIN
                process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches us alone, and we pass it on once
                )
                self._running.add(process)
            code = process.wait()
            log.write(f"[exit {code} after {time.perf_counter() - started:.0f} s]\n".encode())
        with self._lock:
            self._running.discard(process)
        return code

    def end(self) -> None:
        """SIGTERM to all: each finishes its step and writes a checkpoint."""
        with self._lock:
            self._ended = True
            for process in self._running:
                process.terminate()
