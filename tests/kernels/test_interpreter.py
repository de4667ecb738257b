"""What is mended in Triton's interpreter, and canaries that tell when a release mends it itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

_BROKEN = """
import numpy as np, torch, triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import _convert_float, _ir

x = torch.linspace(0.01, 448, 100_001)
raw = x.numpy()
nearest = _ir.ROUNDING_MODE.RTNE
e4m3 = _convert_float(raw, tl.float32, tl.float8e4nv, nearest).view(np.uint8)
bf16 = _convert_float(raw, tl.float32, tl.bfloat16, None).view(np.uint16)
print((e4m3 != x.to(torch.float8_e4m3fn).view(torch.uint8).numpy()).mean())
print((bf16 != x.bfloat16().view(torch.int16).numpy().view(np.uint16)).mean())
"""


@pytest.mark.slow
def test_the_interpreter_still_needs_mending():
    """Fails once Triton rounds correctly: then drop `convert_float` from interpreter.py."""
    run = subprocess.run(
        [sys.executable, "-c", _BROKEN],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    e4m3, bf16 = map(float, run.stdout.split())
    assert e4m3 > 0.001
    assert bf16 > 0.1


def test_the_mended_casts_are_those_of_torch():
    import numpy as np
    import triton.language as tl

    from tests.kernels.interpreter import convert_float

    x = torch.cat([torch.linspace(-500, 500, 10_001), torch.randn(1000) * 1e-3])
    x = x.clamp(-448, 448)
    e4m3 = convert_float(x.numpy(), tl.float32, tl.float8e4nv, None)
    assert np.array_equal(e4m3, x.to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    back = convert_float(e4m3, tl.float8e4nv, tl.float32, None).view(np.float32)
    assert np.array_equal(back, x.to(torch.float8_e4m3fn).float().numpy())
    bf16 = convert_float(x.numpy(), tl.float32, tl.bfloat16, None)
    assert np.array_equal(bf16.view(np.int16), x.bfloat16().view(torch.int16).numpy())
