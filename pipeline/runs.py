"""Where runs live: ids, folders, and finding one again.

<root>/mlflow.db                  the default tracking store
<root>/data/<name>-<hash>/        prepared corpora, shared by runs
<root>/<run id>/                  one run: everything that it writes
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import yaml

from pipeline.config import Config, ConfigError, UnreachableError, from_dict, nearest


@dataclass(frozen=True)
class RunFolder:
    """The places of one run's files, all below `path`."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration, written before anything else."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Metrics by step, one JSON object a line: the source of truth that MLflow is fed from."""
        return self.path / "metrics.jsonl"

    @property
    def stop(self) -> Path:
        """Appears where someone asks the run to stop; see `pipeline.train.stopping`."""
        return self.path / ".stop"

    @property
    def hang(self) -> Path:
        """What the watchdog of the last rank that gave up had to say."""
        return self.path / "HANG.txt"

    @property
    def profile(self) -> Path:
        """Traces of `train.profile_steps`."""
        return self.path / "profile"

    @property
    def logs(self) -> Path:
        """What each worker printed, a file a rank."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def stages(self) -> Path:
        """One JSON manifest for each stage that has finished."""
        return self.path / "stages"

    @property
    def evals(self) -> Path:
        """One folder for each evaluated checkpoint."""
        return self.path / "evals"

    @property
    def results(self) -> Path:
        """Every figure of the report."""
        return self.path / "results.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def figures(self) -> Path:
        return self.path / "figures"

    @property
    def fidelity(self) -> Path:
        """What `compare fidelity` measured, three files a checkpoint."""
        return self.path / "fidelity"

    @property
    def exports(self) -> Path:
        """One model folder for each `export` that was given no other place."""
        return self.path / "exports"

    @property
    def failure(self) -> Path:
        """Marker of a permanent failure: a job runner's retry stops at it."""
        return self.path / "FAILED.json"

    @property
    def eval_failure(self) -> Path:
        """The same of a job that evaluates the run, which says nothing of its training."""
        return self.path / "FAILED-eval.json"


def root_folder(config: Config) -> Path:
    """The absolute folder of all runs and prepared corpora."""
    return Path(config.root).expanduser().resolve()


def new_run_id(label: str) -> str:
    """A new id that sorts by time: `20260131-120000-123456-nvfp4-1a2b`."""
    now = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    return f"{now}-{label}-{secrets.token_hex(2)}"


def list_runs(root: Path) -> list[RunFolder]:
    """All runs below `root`, by when they were started, the newest last."""
    if not root.is_dir():
        return []
    configs = sorted(root.glob("*/config.yaml"), key=lambda path: (path.stat().st_mtime_ns, path))
    return [RunFolder(path.parent) for path in configs]


def find_run(root: Path, run: str) -> RunFolder:
    """The run of that id, an unambiguous beginning of it, or `latest`. Raises `ConfigError`."""
    runs = list_runs(root)
    if not runs:
        raise ConfigError(f"run={run}: there is no run in {root}; start one with: pipeline run")
    if run == "latest":
        return runs[-1]
    matches = [item for item in runs if item.id == run] or [
        item for item in runs if item.id.startswith(run)
    ]
    if not matches:
        raise ConfigError(
            f"run={run}: no such run in {root}; {nearest(run, (item.id for item in runs))}"
        )
    if len(matches) > 1:
        raise ConfigError(f"run={run} fits {len(matches)} runs in {root}; give more of the id")
    return matches[0]


NOT_OF_A_RUN = ("plan", "manifest")  # sections whose keys come and go without a run's noticing


def load_config(run: RunFolder) -> Config:
    """A run's own configuration. Raises `ConfigError` where this version cannot read it."""
    try:
        raw = yaml.safe_load(run.config.read_text())
        raw = raw if isinstance(raw, dict) else {}
        return from_dict({key: raw[key] for key in raw if key not in NOT_OF_A_RUN})
    except (ConfigError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{run.config}: not a configuration that this version reads ({error})"
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, sees the old one or the new one, whole."""
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def is_locked(run: RunFolder) -> bool:
    """Whether a process works on the run."""
    lock = run.path / ".lock"
    if not lock.is_file():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.contextmanager
def locked(run: RunFolder) -> Iterator[None]:
    """Hold a run for this process. Raises `ConfigError` where another one works on it."""
    with (run.path / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnreachableError(
                f"run {run.id} is in use by another process; wait for it"
            ) from None
        yield
