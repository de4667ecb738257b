"""What the sandbox's process does to itself before it runs a program. Started by `evals.sandbox`;
imports nothing of this project, since it runs in Python's isolated mode.

    python -I sandbox_inside.py <folder> <program> <memory> <seconds> <file bytes> <files>

The first line of standard input is what to print when the program has come to its end.

Linux only. Landlock (landlock(7)) leaves writing to the folder alone; a seccomp filter (seccomp(2))
forbids what a test of a function never needs. Exits with `REFUSED` where the kernel grants neither.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

REFUSED = 125
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER_MODE = 38, 22, 2
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every machine
CLONE_THREAD = 0x10000

# By machine: the audit architecture, clone, clone3, and what is forbidden: sockets, processes and
# programs, signals to others, tracing, io_uring (which opens sockets past a filter), mounts and
# namespaces, raising one's limits, modes and owners of files (which Landlock does not cover).
MACHINES = {
    "x86_64": (
        0xC000003E, 56, 435,
        (41, 42, 53, 57, 58, 59, 322, 62, 200, 234, 129, 297, 424, 101, 311, 425, 165, 272, 308,
         160, 302, 90, 91, 92, 93, 94, 260, 268, 452),
    ),
    "aarch64": (
        0xC00000B7, 220, 435,
        (198, 203, 199, 221, 281, 129, 130, 131, 138, 240, 424, 117, 271, 425, 40, 97, 268,
         164, 261, 52, 53, 54, 55, 452),
    ),
}  # fmt: skip


def limit_resources(memory: int, seconds: int, file_bytes: int, files: int) -> None:
    """Limits that the filter keeps from being raised again."""
    for which, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(which, (value, value))


def keep_to_folder(libc: ctypes.CDLL, folder: str) -> None:
    """Landlock: create, change and remove files below `folder` only. Reading stays free."""
    abi = libc.syscall(CREATE_RULESET, None, 0, 1)
    if abi < 3:  # earlier ones let any file be cut to nothing
        sys.exit(REFUSED)
    rights = (1 << 1) | sum(1 << bit for bit in range(4, 15))  # WRITE_FILE, REMOVE_DIR .. TRUNCATE
    ruleset = libc.syscall(CREATE_RULESET, struct.pack("<Q", rights), 8, 0)
    parent = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    rule = struct.pack("<Qi", rights, parent)
    if ruleset < 0 or libc.syscall(ADD_RULE, ruleset, 1, rule, 0):
        sys.exit(REFUSED)
    if libc.syscall(RESTRICT_SELF, ruleset, 0):
        sys.exit(REFUSED)


def forbid_system_calls(libc: ctypes.CDLL) -> None:
    """Seccomp's classic filter: the machine's list gives EPERM, threads are allowed."""
    machine = MACHINES.get(os.uname().machine)
    if machine is None:
        sys.exit(REFUSED)
    arch, clone, clone3, forbidden = machine
    load, equal, at_least, has_bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    permit, refuse, unknown, kill = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
    steps = [
        (load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill),
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (give, 0, 0, kill),  # the x32 interface
        (equal, 0, 1, clone3), (give, 0, 0, unknown),  # the C library falls back to clone
        (equal, 0, 4, clone), (load, 0, 0, 16), (has_bits, 0, 1, CLONE_THREAD),
        (give, 0, 0, permit), (give, 0, 0, refuse),
    ]  # fmt: skip
    for number in forbidden:
        steps += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    steps.append((give, 0, 0, permit))
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(code))
    if libc.prctl(SET_SECCOMP, FILTER_MODE, program, 0, 0):
        sys.exit(REFUSED)


def main() -> None:
    folder, program, *numbers = sys.argv[1:]
    token = sys.stdin.readline()
    with open(program, encoding="utf-8") as file:
        source = file.read()
    sys.argv = [program]
    libc = ctypes.CDLL(None, use_errno=True)
    limit_resources(*map(int, numbers))
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        sys.exit(REFUSED)
    keep_to_folder(libc, folder)
    forbid_system_calls(libc)
    try:
        exec(compile(source, "program", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"\n{token}")


if __name__ == "__main__":
    main()
