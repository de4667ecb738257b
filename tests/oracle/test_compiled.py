"""A compiled model takes the oracle's step: torch.compile works between the linears only.

The linears stay outside the graphs, so all of them are held to the oracle as ever: codes to the
byte, products within their bounds. What is compiled may round otherwise. The tolerances for it are
measured: ``in_dt``'s dy, A_log and dt_bias need them, sums in the scan that nearly cancel; all else
agrees to 3e-7.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest

from tests.oracle import numbers
from tests.oracle.codes import compare_codes
from tests.oracle.compare import compare, shown
from tests.oracle.mutants import BOTH_GRADIENTS, MicroBatchOffByOne
from tests.oracle.paths import Path, walk
from tests.oracle.step import Step
from tests.oracle.witness import Witness

pytestmark = pytest.mark.slow

BACKWARD = {"dy": 1e-3, "gradient": 1e-2}
WHOLE = Path("nvfp4", modes=("recipe", "bf16_forward"), compiled="loss", compiler="aot_eager")
COMPILED: dict[str, tuple[Path, Mapping[str, float]]] = {
    "the whole loss, traced": (WHOLE, BACKWARD),  # the forward pass to the bit
    "each block, fused by inductor": (
        Path("nvfp4", compiled="blocks", compiler="inductor"),
        BACKWARD | {"x": 1e-6},
    ),
}


@cache
def walked(path: Path) -> list[tuple[Step, Witness]]:
    compilers = ("c++", "g++", "clang++")
    if path.compiler == "inductor" and not any(map(shutil.which, compilers)):
        pytest.skip(f"inductor needs a C++ compiler, one of {compilers}")
    return walk(path)


@pytest.mark.parametrize("name", COMPILED)
def test_every_figure_of_two_steps_is_the_oracle_s(name: str) -> None:
    path, slack = COMPILED[name]
    for step, witness in walked(path):
        mismatches, passes = compare(step, witness, slack=slack)
        assert not mismatches, shown(mismatches)
        wrong_codes = compare_codes(step, witness, passes)
        assert not wrong_codes, shown(wrong_codes)


@pytest.mark.parametrize("name", COMPILED)
def test_all_is_compiled_in_the_first_micro_batch(name: str) -> None:
    """Another micro-batch, step, learning rate, precision or weight makes no further graph."""
    (_, first), (_, second) = walked(COMPILED[name][0])
    before, after, *later = first.frames + second.frames
    assert after > before + 10
    assert set(later) == {after}


def test_a_linear_that_keys_its_rounding_otherwise_is_noticed() -> None:
    step, witness = walked(WHOLE)[0]
    mismatches, passes = compare(step, witness, MicroBatchOffByOne(), BACKWARD)
    codes = compare_codes(step, witness, passes)
    assert {mismatch.what for mismatch in mismatches + codes} == BOTH_GRADIENTS


@pytest.mark.parametrize("what", ["x", "dy"])
def test_a_graph_that_computes_in_bf16_is_noticed(what: str) -> None:
    step, witness = walked(WHOLE)[0]
    rounded = copy.deepcopy(witness)
    for call in rounded.calls.values():
        call[what] = numbers.bf16(call[what]).astype(np.float32)
    mismatches, _ = compare(step, rounded, slack=BACKWARD | {"x": 1e-6})
    assert len({m.where for m in mismatches if m.what == what}) > len(step.formats)
