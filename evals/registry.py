"""Finding tasks: ours in `tasks/`, and the harness's without reading its 14,000 files as YAML.

The harness is imported only when a task is built (it takes 2 s).
"""

from __future__ import annotations

import difflib
import importlib.util
import io
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

TASKS = Path(__file__).parent / "tasks"
HUB_TIMEOUT = 5.0  # seconds

_NAMED = re.compile(
    r"""^[ \t]*(?:-[ \t]*)?["']?(?:task|group|tag)["']?\s*:[ \t]*
        ["']?([^\s"'#\[\]]*)["']?             # a name, or
        (?:[ \t]*\[(.*?)\])?[^\n]*\n         # a list in brackets, or
        ((?:[ \t]*-[ \t]*[^\n]*\n)*)         # one below""",
    re.MULTILINE | re.VERBOSE,
)
_ITEM = re.compile(r"""^[ \t]*-[ \t]*["']?([\w.+-]+)["']?[ \t]*(?:\#.*)?$""", re.MULTILINE)


class TaskUnavailableError(RuntimeError):
    """A task that exists cannot be run here; the message says why."""


@dataclass(frozen=True)
class TaskSettings:
    """What a suite says of a task; None: as the task itself says.

    shots: examples before each question. metric: the one that the task is judged by.
    members: tasks that together are this one, for which the harness has no name.
    paper_fp8, paper_nvfp4: what arXiv 2509.25149 reports for its 12B, in percent.
    """

    shots: int | None = None
    metric: str | None = None
    label: str | None = None
    members: tuple[str, ...] = ()
    paper_fp8: float | None = None
    paper_nvfp4: float | None = None


@dataclass(frozen=True)
class Files:
    """Local files: `folder` holds those that tasks name; `of_task` are made for one task."""

    folder: Path | None = None
    of_task: Mapping[str, Path] = field(default_factory=dict)


def own_tasks() -> list[str]:
    """The names of our own tasks."""
    return sorted(path.stem for path in TASKS.glob("[!_]*.yaml"))


def check_names(names: Iterable[str]) -> None:
    """Refuse a task that neither we nor the harness have. Takes two seconds, without importing it.

    Raises `ValueError` with the nearest names.
    """
    others = sorted(set(names) - set(own_tasks()))
    known = _harness_names() if others else {}
    unknown = [name for name in others if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], [*own_tasks(), *known], n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else f"ours: {', '.join(own_tasks())}"
        raise ValueError(
            f"evals.tasks: the harness knows no task {', '.join(unknown)}; {hint} "
            "(`lm-eval ls tasks` lists the harness's)"
        )


@cache
def _harness_names() -> dict[str, list[Path]]:
    """Every name that the harness's files define, with the topmost folders that define it."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent / "tasks"
    folders: dict[str, set[Path]] = {}
    for place, _, files in os.walk(root):
        for file in files:
            if not file.endswith("yaml"):  # also templates such as `cot_yaml`
                continue
            text = Path(place, file).read_text(encoding="utf-8") + "\n"
            top = root / Path(place).relative_to(root).parts[0]
            for name, listed, below in _NAMED.findall(text):
                inline = (item.strip(" \"'") for item in listed.split(","))
                for each in {name, *inline, *_ITEM.findall(below)} - {""}:
                    folders.setdefault(each, set()).add(top)
    return {name: sorted(tops) for name, tops in folders.items()}


class Registry:
    """Builds harness tasks by name, from the folders that define them."""

    def __init__(self, names: Sequence[str], settings: Mapping[str, TaskSettings]) -> None:
        from lm_eval.tasks import TaskManager

        self.settings = settings
        own = set(own_tasks())
        members = [member for name in names for member in self._members(name)]
        folders = {
            str(folder)
            for name in members
            if name not in own
            for folder in _harness_names().get(name, [])
        }
        with quiet():
            self.manager = TaskManager(include_path=sorted(folders) or None, include_defaults=False)

    def _members(self, name: str) -> Sequence[str]:
        return self.settings.get(name, TaskSettings()).members or (name,)

    def build(self, name: str, files: Files, cache: str) -> dict[str, Any]:
        """The tasks and groups of a name, as `lm_eval.evaluator.evaluate` takes them.

        cache: a folder for what `datasets` makes of local files.

        Raises:
            TaskUnavailableError: where its data cannot be had.
            ValueError: where its local file is named wrongly.
        """
        try:
            specs = [self._spec(member, files, cache) for member in self._members(name)]
            return dict(self.manager.load(specs))
        except (OSError, ImportError, RuntimeError, AssertionError) as error:
            raise TaskUnavailableError(f"{type(error).__name__}: {_first_line(error)}") from error
        except ValueError as error:
            if "datasets" not in type(error).__module__ and "Hub" not in str(error):
                raise
            raise TaskUnavailableError(_first_line(error)) from error

    def _spec(self, name: str, files: Files, cache: str) -> str | dict[str, Any]:
        if name not in own_tasks():
            return name
        from lm_eval.tasks._yaml_loader import load_yaml

        task = load_yaml(TASKS / f"{name}.yaml", resolve_func=True)
        path = local_file(name, task.get("metadata", {}).get("file"), files)
        if path is None:
            return task
        return task | {"dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": cache}}


def local_file(name: str, file: str | None, files: Files) -> Path | None:
    """The absolute path of the file that an own task reads; None where its data are the hub's.

    Raises `ValueError` where it is not there.
    """
    if name in files.of_task:
        return files.of_task[name].resolve()
    if file is None:
        return None
    if files.folder is None:
        raise ValueError(f"{name} reads {file}: name its folder with evals.files=<folder>")
    path = files.folder / file
    if not path.is_file():
        raise ValueError(f"{name} reads {path}, which is not there; see evals.files")
    return path.resolve()


def hub_answers() -> bool:
    """Whether the Hugging Face hub can be reached at all, so that a closed one costs seconds."""
    from urllib.error import HTTPError
    from urllib.request import urlopen

    try:
        urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=HUB_TIMEOUT)
    except HTTPError:
        return True
    except OSError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars (on standard error) and no log lines below errors from the harness.

    Its warnings are about defaults (generation settings of tasks that generate nothing).
    """
    loggers = [logging.getLogger(name) for name in ("lm_eval", "sqlitedict", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
