"""Running a program that a model wrote, where it can do no harm.

It runs in a process of its own that forbids itself, by the kernel's hand, sockets, processes,
signals to others and writing outside a throw-away folder (see `evals.sandbox_inside`), in a network
namespace of its own where this user may make one. Time, memory, file sizes and open files are
limited. Where the kernel does not keep such promises, nothing is run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from evals.sandbox_inside import REFUSED

INSIDE = Path(__file__).with_name("sandbox_inside.py")
NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")


class SandboxUnavailableError(RuntimeError):
    """This machine cannot confine a program, so none is run."""


@dataclass(frozen=True)
class Limits:
    """What a program may use: seconds of the CPU and of time, bytes of memory and of a file.

    Time is longer, so that a busy machine makes no right program wrong.
    """

    cpu_seconds: int = 10
    seconds: float = 60.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    open_files: int = 64


@dataclass(frozen=True)
class Outcome:
    """Whether the program ran to its end; `reason` says why not."""

    passed: bool
    reason: str = ""


def run_program(source: str, limits: Limits = Limits()) -> Outcome:
    """Run a Python program to its end, or until it breaks a limit.

    Raises `SandboxUnavailableError` where it cannot be confined.
    """
    isolation()
    return _run(source, limits)


@functools.cache
def isolation() -> str:
    """What confines programs on this machine, tried once with one that opens a socket and one that
    does not.

    Raises `SandboxUnavailableError`.
    """
    harmless, talkative = _run("pass", Limits()), _run("import socket; socket.socket()", Limits())
    if not harmless.passed or talkative.passed:
        raise SandboxUnavailableError(
            "code that the model wrote is not run: this machine grants no Landlock and seccomp "
            f"({harmless.reason or 'a socket was opened'}); Linux 6.2 or later has both"
        )
    return " + ".join(("Landlock", "seccomp", *(("network namespace",) if _namespace() else ())))


@functools.cache
def _namespace() -> tuple[str, ...]:
    """The command that gives a program a network of its own; none where that is refused."""
    if not shutil.which(NAMESPACE[0]):
        return ()
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False)
    return NAMESPACE if tried.returncode == 0 else ()


def _run(source: str, limits: Limits) -> Outcome:
    token = os.urandom(16).hex()  # which a program that ends early cannot print
    with tempfile.TemporaryDirectory(prefix="sandbox-") as place:
        folder, program, output = (Path(place, name) for name in ("work", "program.py", "output"))
        folder.mkdir()
        program.write_text(source, encoding="utf-8")
        numbers = (
            limits.memory_bytes, limits.cpu_seconds, limits.file_bytes, limits.open_files
        )  # fmt: skip
        inside = [sys.executable, "-I", str(INSIDE), str(folder), str(program)]
        with output.open("w+b") as file:
            process = subprocess.Popen(
                [*_namespace(), *inside, *map(str, numbers)],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder)},
                start_new_session=True,  # without the user's terminal
            )
            try:
                process.communicate(token.encode(), limits.seconds)
            except subprocess.TimeoutExpired:
                return Outcome(False, f"timeout after {limits.seconds:g} s")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return _outcome(process.returncode, output, token)


def _outcome(code: int, output: Path, token: str) -> Outcome:
    lines = output.read_bytes()[-10_000:].decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else ""
    if code == 0 and last == token:
        return Outcome(True)
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return Outcome(False, "timeout of the CPU")
    if code == REFUSED:
        return Outcome(False, "the kernel refused the sandbox")
    return Outcome(False, last[:300] if code else "ended before its tests were done")
