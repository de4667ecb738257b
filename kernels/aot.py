"""Compile kernels ahead of time for any NVIDIA target, without a GPU, and measure what came out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import sass

TARGETS = (90, 100, 103, 120)
"""Hopper, Blackwell (B200), Blackwell Ultra (B300), and Blackwell for workstations."""

SHARED_BYTES = {90: 227 << 10, 100: 227 << 10, 103: 227 << 10, 120: 99 << 10}
"""Shared memory that one program may have (CUDA programming guide, compute capabilities)."""

TENSOR_COLUMNS = 512
"""Columns of a Blackwell multiprocessor's tensor memory."""

B200_SMS = 148
B200_LANES = 128
B200_HERTZ = 1.85e9
B200_BYTES_PER_SECOND = 8e12


@dataclass(frozen=True)
class Variant:
    """One way to compile one kernel.

    Attributes:
        name: what tables call it.
        kernel: the Triton function.
        signature: types of its runtime arguments, in Triton's notation; pointers and integers are
            declared divisible by 16, those in `unaligned` excepted.
        constants: its compile-time arguments, except TARGET.
        num_warps: warps of one program.
        elements: elements of the input that one program handles.
        bytes_per_element: bytes read and written for each, codes and scales included.
        required: PTX that must occur, by pattern, and how often at least; by target.
        forbidden: PTX that must not occur, by target.
        trips: how often the body of each loop runs for one tile; see `sass.executed`. None: what
            runs depends on the operands' size, so each instruction of the code counts once.
        cold: pattern of the SASS operations that mark a path which is not counted.
        targets: where it runs.
    """

    name: str
    kernel: Any
    signature: Mapping[str, Any]
    constants: Mapping[str, Any]
    num_warps: int
    elements: int
    bytes_per_element: float
    required: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    forbidden: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    trips: tuple[int, ...] | None = ()
    unaligned: tuple[str, ...] = ()
    cold: str = "CALL"
    targets: tuple[int, ...] = TARGETS


@dataclass(frozen=True)
class Measurement:
    """What the compiler made of a variant for one target.

    Attributes:
        instructions_per_element: SASS instructions that one thread issues for its tile, times the
            threads of a program, divided by the elements of the tile.
        sass_instructions: instructions that one thread issues for its tile.
        bound_elements_per_second: what a B200 could reach, by instructions or by bytes.
        bound_by: which of the two.
        required_instructions_present: whether the PTX holds what it must and nothing forbidden.
        problems: what was missing or forbidden, and the spills.
    """

    kernel: str
    target: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    sass_instructions: int
    instructions_per_element: float
    bound_elements_per_second: float
    bound_by: str
    required_instructions_present: bool
    problems: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def compile_variant(variant: Variant, target: int) -> Any:
    """Triton's compiled kernel, with `asm["ptx"]` and `asm["cubin"]`."""
    names = variant.kernel.arg_names
    constants = dict(variant.constants)
    if "TARGET" in names:
        constants["TARGET"] = target
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if isinstance(signature[name], str)
        and (signature[name].startswith("*") or re.fullmatch(r"[iu]\d+", signature[name]))
        and name not in variant.unaligned
    }
    source = ASTSource(variant.kernel, signature, constants, attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", target, 32), options={"num_warps": variant.num_warps}
    )


def measure(variant: Variant, target: int) -> Measurement:
    """Compile a variant and count.

    Raises:
        ValueError: the number of loops in the SASS is not that of `trips`.
    """
    compiled = compile_variant(variant, target)
    instructions, resources = sass.disassemble(compiled.asm["cubin"])
    if variant.trips is None:
        count = sum(instruction.name != "NOP" for instruction in instructions)
    else:
        count = sass.executed(instructions, variant.trips, variant.cold).total()
    per_element = count * variant.num_warps * 32 / variant.elements
    by_instructions = B200_SMS * B200_LANES * B200_HERTZ / per_element
    by_bytes = B200_BYTES_PER_SECOND / variant.bytes_per_element
    wrong = _wrong_instructions(variant, target, compiled.asm["ptx"])
    spilled = resources.stack_bytes or resources.spill_bytes
    problems = (*wrong, *(["registers spill, or the stack is used"] if spilled else []))
    problems = (*problems, *_too_large(compiled.metadata, target))
    return Measurement(
        kernel=variant.name,
        target=target,
        registers=resources.registers,
        stack_bytes=resources.stack_bytes,
        spill_bytes=resources.spill_bytes,
        shared_bytes=compiled.metadata.shared,
        sass_instructions=count,
        instructions_per_element=round(per_element, 3),
        bound_elements_per_second=min(by_instructions, by_bytes),
        bound_by="instructions" if by_instructions < by_bytes else "bytes",
        required_instructions_present=not wrong,
        problems=problems,
    )


def _too_large(metadata: Any, target: int) -> list[str]:
    """What a multiprocessor cannot hold; the compiler does not tell."""
    problems = []
    if metadata.shared > SHARED_BYTES[target]:
        problems.append(f"{metadata.shared} bytes of shared memory, of {SHARED_BYTES[target]}")
    if metadata.tmem_size > TENSOR_COLUMNS:
        problems.append(f"{metadata.tmem_size} columns of tensor memory, of {TENSOR_COLUMNS}")
    return problems


def _wrong_instructions(variant: Variant, target: int, ptx: str) -> list[str]:
    problems = []
    for pattern, least in variant.required.get(target, {}).items():
        found = len(re.findall(pattern, ptx))
        if found < least:
            problems.append(f"{pattern!r} occurs {found} times, not {least}")
    for pattern in variant.forbidden.get(target, ()):
        if re.search(pattern, ptx):
            problems.append(f"{pattern!r} must not occur")
    return problems
