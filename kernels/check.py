"""`python -m kernels.check`: what the compiler makes of every kernel, without a GPU.

Each variant is compiled ahead of time; the PTX must hold the instructions that make it fast or
exact, nothing may spill, and the SASS that one tile executes is counted. `instr/elem` is
instructions per thread x threads / elements of a tile. The bound is that of a B200: 148 SMs x 128
lanes x 1.85 GHz, or 8 TB/s, whichever is lower.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

from kernels.aot import TARGETS, Measurement, measure
from kernels.variants import variants


def check(names: list[str] | None = None, targets: tuple[int, ...] = TARGETS) -> list[Measurement]:
    """Measurements of the variants whose name holds one of `names`, in the order of the table."""
    jobs = [
        (variant.name, target)
        for variant in variants()
        for target in targets
        if target in variant.targets and (not names or any(n in variant.name for n in names))
    ]
    workers = min(len(jobs), os.cpu_count() or 1)
    if workers <= 1:
        return [_measure(*job) for job in jobs]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(pool.map(_measure, *zip(*jobs, strict=True)))


def _measure(name: str, target: int) -> Measurement:
    variant = next(v for v in variants() if v.name == name)
    return measure(variant, target)


def table(measurements: list[Measurement]) -> str:
    """The measurements as text."""
    rows = [
        "kernel                             sm  regs stack spill shared   SASS instr/elem"
        "  bound Telem/s"
    ]
    for m in measurements:
        rows.append(
            f"{m.kernel:33s} {m.target:3d} {m.registers:5d} {m.stack_bytes:5d} {m.spill_bytes:5d} "
            f"{m.shared_bytes:6d} {m.sass_instructions:6d} {m.instructions_per_element:10.2f} "
            f"{m.bound_elements_per_second / 1e12:7.2f} ({m.bound_by})"
        )
        rows += [f"    wrong: {problem}" for problem in m.problems]
    return "\n".join(rows)


def main() -> int:
    """Print the table or JSON; 1 if a kernel spills or lacks an instruction, else 0."""
    parser = argparse.ArgumentParser(prog="python -m kernels.check", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)), help="such as 90,100")
    parser.add_argument("names", nargs="*", help="parts of kernel names; all if none")
    arguments = parser.parse_args()
    known = [variant.name for variant in variants()]
    for name in arguments.names:
        if not any(name in each for each in known):
            parser.error(f"no kernel's name holds {name!r}; there are {', '.join(known)}")
    wanted = arguments.targets.split(",")
    if not {*wanted} <= {*map(str, TARGETS)}:
        parser.error(f"--targets={arguments.targets}: choose of {', '.join(map(str, TARGETS))}")
    measurements = check(arguments.names, tuple(map(int, wanted)))
    if not measurements:
        parser.error("none of these kernels is compiled for these targets")
    if arguments.json:
        print(json.dumps({"rows": [m.as_dict() for m in measurements]}, indent=2))
    else:
        print(table(measurements))
    return int(any(m.problems for m in measurements))


if __name__ == "__main__":
    sys.exit(main())
