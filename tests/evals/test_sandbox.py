"""A program that misbehaves is stopped, does no harm, and counts as wrong."""

from __future__ import annotations

import platform
import subprocess
import time
from pathlib import Path

import pytest

from evals import sandbox
from evals.code_tasks import humaneval, mbpp
from evals.sandbox import Limits, SandboxUnavailableError, run_program

LIMITS = Limits(cpu_seconds=5)


@pytest.fixture(scope="module", autouse=True)
def granted() -> None:
    try:
        sandbox.isolation()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


def test_a_program_that_passes_its_tests_passes() -> None:
    source = "import math, threading, collections\nassert math.gcd(12, 18) == 6\nprint('noise')\n"
    assert run_program(source, LIMITS).passed


def test_it_may_write_in_its_own_folder() -> None:
    assert run_program("open('a', 'w').write('x'); assert open('a').read() == 'x'", LIMITS).passed


WRONG = {
    "fails its test": ("assert 1 == 2", "AssertionError"),
    "ends before its tests": ("import sys; sys.exit(0)\nassert False", "SystemExit"),
    "ends past Python": ("import os; os._exit(0)\nassert False", "ended before"),
    "is no program": ("def f(:", "SyntaxError"),
    "forks": ("import os\nwhile True: os.fork()", "PermissionError"),
    "starts programs": ("import subprocess; subprocess.run(['true'])", "PermissionError"),
    "eats memory": ("x = bytearray(4 << 30)", "MemoryError"),
    "fills the disk": ("open('a', 'w').write('x' * (64 << 20))", "OSError"),
    "opens many files": ("[open(f'f{i}', 'w') for i in range(200)]\n", "OSError"),
    "opens a socket": ("import socket; socket.socket()", "PermissionError"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_program_that(what: str) -> None:
    source, reason = WRONG[what]
    outcome = run_program(source, LIMITS)
    assert not outcome.passed
    assert reason in outcome.reason


SIGNALS = {  # a process may signal itself, and so may its threads; here it names another
    "kill": "(62, {pid}, 15)",
    "tkill": "(200, {pid}, 15)",
    "tgkill": "(234, {pid}, {pid}, 15)",
    "rt_sigqueueinfo": "(129, {pid}, 15, info)",
    "rt_tgsigqueueinfo": "(297, {pid}, {pid}, 15, info)",
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are of x86_64")
@pytest.mark.parametrize("call", SIGNALS)
def test_it_cannot_signal_the_user_s_processes(call: str) -> None:
    victim = subprocess.Popen(["sleep", "100"])
    try:
        arguments = SIGNALS[call].format(pid=victim.pid)
        outcome = run_program(
            "import ctypes\ninfo = (ctypes.c_int * 32)(15, 0, -1)\n"
            "libc = ctypes.CDLL(None, use_errno=True)\n"
            f"assert libc.syscall{arguments} == -1, 'signalled'\n"
            "assert ctypes.get_errno() == 1, ctypes.get_errno()\n",
            LIMITS,
        )
        assert outcome.passed, outcome.reason
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_it_has_no_terminal_of_the_user_s() -> None:
    assert run_program("import os; assert os.getsid(0) == os.getpid()", LIMITS).passed


def test_it_cannot_raise_its_own_limits() -> None:
    source = (
        "import resource as r\nsoft, hard = r.getrlimit(r.RLIMIT_NOFILE)\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (hard, hard + 1))"
    )
    assert not run_program(source, LIMITS).passed


@pytest.mark.parametrize(
    "deed",
    [
        "import os; os.open({path!r}, os.O_RDONLY | os.O_TRUNC)",
        "open({path!r}, 'w').write('changed')",
        "import os; os.unlink({path!r})",
        "import os; os.truncate({path!r}, 0)",
        "import os; os.rename({path!r}, 'mine')",
        "import os; os.chmod({path!r}, 0)",
        "import os; os.symlink('x', {path!r} + '-link')",
    ],
)
def test_files_elsewhere_stay_as_they_are(deed: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("before")
    mode = victim.stat().st_mode
    assert not run_program(deed.format(path=str(victim)), LIMITS).passed
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    assert (victim.read_text(), victim.stat().st_mode) == ("before", mode)


def test_a_loop_ends_in_time() -> None:
    assert run_program("while True: pass", Limits(cpu_seconds=1)).reason == "timeout of the CPU"
    started = time.monotonic()
    outcome = run_program("import time; time.sleep(1000)", Limits(seconds=2))
    assert outcome.reason == "timeout after 2 s"
    assert time.monotonic() - started < 30


def test_where_the_kernel_grants_nothing_no_program_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.isolation.cache_clear()
    monkeypatch.setattr(sandbox, "INSIDE", Path(__file__).with_name("no_sandbox.py"))
    with pytest.raises(SandboxUnavailableError, match="is not run"):
        run_program("open('/tmp/x', 'w')")
    sandbox.isolation.cache_clear()


def test_completions_are_scored_with_their_tests() -> None:
    document = {
        "prompt": "def add(a, b):\n",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        "entry_point": "add",
    }
    assert humaneval(document, ["    return a + b\n"]) == {"pass_at_1": 1.0}
    assert humaneval(document, ["    return a - b\n"]) == {"pass_at_1": 0.0}
    problem = {"test_setup_code": "import math", "test_list": ["assert area(1) == math.pi"]}
    assert mbpp(problem, ["def area(r):\n    return math.pi * r * r"]) == {"pass_at_1": 1.0}
    assert mbpp(problem, ["def area(r):\n    return 3"]) == {"pass_at_1": 0.0}
