"""Which machine code a launch needs."""

from __future__ import annotations

import torch
import triton

INTERPRETER = 0
SUPPORTED = (90, 100, 103, 120)


def target_of(device: torch.device) -> int:
    """The TARGET of kernels on `device`: ten times its compute capability, or INTERPRETER.

    Raises:
        ValueError: a device that the kernels were not written for.
    """
    if triton.knobs.runtime.interpret:
        return INTERPRETER
    if device.type != "cuda":
        raise ValueError(f"the Triton kernels need a CUDA device, not {device}")
    major, minor = torch.cuda.get_device_capability(device)
    target = 10 * major + minor
    if target not in SUPPORTED:
        raise ValueError(
            f"the Triton kernels are built for compute capabilities {SUPPORTED} (times ten), not "
            f"{target}: quantize with plain torch on this device"
        )
    return target
