"""Read a compiled kernel: resources, and the instructions that one tile executes.

Counts come from the disassembly of the cubin with the tools that Triton ships, so no GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_LOCAL_WIDTH = re.compile(r"(?:STL|LDL)(?:\.\w+)*?\.(64|128|U8|S8|U16|S16)")


@dataclass(frozen=True)
class Instruction:
    """One line of SASS: its address, the predicate (or ""), the operation and its operands."""

    address: int
    predicate: str
    operation: str
    operands: str

    @property
    def name(self) -> str:
        """The operation without its modifiers."""
        return self.operation.split(".")[0]

    @property
    def target(self) -> int | None:
        """Where a branch goes, if this is one."""
        match = _TARGET.search(self.operands) if self.name == "BRA" else None
        return int(match.group(1), 16) if match else None


@dataclass(frozen=True)
class Resources:
    """What a kernel occupies, per thread: registers, and bytes of stack and of spills."""

    registers: int
    stack_bytes: int
    spill_bytes: int


def parse(text: str) -> list[Instruction]:
    """Instructions of one kernel in `cuobjdump -sass` output."""
    instructions = []
    for address, body in _LINE.findall(text):
        words = body.split(maxsplit=1)
        predicate = ""
        if words[0].startswith("@"):
            predicate, words = words[0], words[1].split(maxsplit=1)
        operands = words[1].strip() if len(words) > 1 else ""
        instructions.append(Instruction(int(address, 16), predicate, words[0], operands))
    return instructions


def executed(
    instructions: Sequence[Instruction], trips: Sequence[int] = (), cold: str = "CALL"
) -> Counter[str]:
    """How often each operation is issued for one tile.

    The walk starts at the entry and ends at the unconditional exit, so trap stubs and out-of-line
    paths do not count; nor do NOPs. A forward branch or exit over an operation that matches `cold`
    (a call is the slow path of a division) is taken, any other conditional one is not: what it may
    skip counts. The body of a loop counts `trips` times; loops are in the order of their closing
    branches.

    Raises:
        ValueError: another number of loops than trips.
    """
    position = {instruction.address: i for i, instruction in enumerate(instructions)}
    end = max(i for i, x in enumerate(instructions) if x.name == "EXIT" and not x.predicate)
    path, i = [], 0
    while True:
        current = instructions[i]
        path.append(current)
        following = i + 1
        if current.name == "EXIT":
            following = end + 1
        elif current.target is not None and current.target > current.address:
            following = position[current.target]
        conditional = bool(current.predicate) or "P" in current.operands.split(",")[0]
        skipped = instructions[i + 1 : following]
        if conditional and not any(re.match(cold, s.operation) for s in skipped):
            following = i + 1
        if following > end:
            break
        i = following
    loops = [p for p in path if p.target is not None and p.target < p.address]
    if len(loops) != len(trips):
        raise ValueError(f"the kernel has {len(loops)} loops, but trips are given for {len(trips)}")
    counts: Counter[str] = Counter()
    for instruction in path:
        if instruction.name == "NOP":
            continue
        weight = 1
        for loop, times in zip(loops, trips, strict=True):
            if loop.target <= instruction.address <= loop.address:  # type: ignore[operator]
                weight *= times
        counts[instruction.operation] += weight
    return counts


def disassemble(cubin: bytes) -> tuple[list[Instruction], Resources]:
    """Instructions and resources of the one kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = _run("-sass", file.name)
        usage = _run("-res-usage", file.name)
    instructions = parse(sass)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    spills = sum(_local_bytes(i) for i in instructions if i.name == "STL")
    return instructions, Resources(int(found.group(1)), int(found.group(2)), spills)


def _local_bytes(instruction: Instruction) -> int:
    width = _LOCAL_WIDTH.match(instruction.operation)
    return (
        {"64": 8, "128": 16, "U8": 1, "S8": 1, "U16": 2, "S16": 2}[width.group(1)] if width else 4
    )


def _run(option: str, path: str) -> str:
    command = [str(_TOOLS / "cuobjdump"), option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
