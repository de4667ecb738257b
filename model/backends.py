"""Which implementation runs each kind of block, decided in one place.

``mamba-ssm`` and ``causal-conv1d`` serve Mamba-2 on CUDA where both import; elsewhere the scan and
the convolution of this package do. Attention is PyTorch's scaled dot-product attention everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch


class MambaKernels(NamedTuple):
    """The two CUDA functions that replace the torch convolution and scan."""

    conv: Callable[..., Any]
    scan: Callable[..., Any]


@cache
def _import_mamba_kernels() -> MambaKernels | None:
    try:
        from causal_conv1d import causal_conv1d_fn
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError:
        return None
    return MambaKernels(causal_conv1d_fn, mamba_chunk_scan_combined)


def mamba_kernels(device: torch.device, dtype: torch.dtype) -> MambaKernels | None:
    """The kernels for this device and activation dtype, or None where the torch path runs."""
    if device.type != "cuda" or dtype == torch.float64:
        return None
    return _import_mamba_kernels()


def paths(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The implementation of each block kind, for the log."""
    return {
        "mamba": "mamba-ssm + causal-conv1d" if mamba_kernels(device, dtype) else "torch",
        "attention": "scaled_dot_product_attention",
        "ffn": "torch",
    }
