"""Which implementation runs each kind of block, decided in one place, by what is there.

On CUDA, Mamba-2 runs `causal-conv1d`'s and `mamba-ssm`'s kernels where both import and take the
shape, and attention PyTorch's variable-length kernel; elsewhere the convolution, the scan and the
masked attention of this package run. `paths` says which, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from model.config import ModelConfig


class MambaKernels(NamedTuple):
    """The two CUDA functions that replace the torch convolution and scan."""

    conv: Callable[..., Any]
    """`causal_conv1d.causal_conv1d_fn`."""
    scan: Callable[..., Any]
    """`mamba_ssm`'s `mamba_chunk_scan_combined`."""


def mamba_kernels(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> MambaKernels | None:
    """The kernels for this shape, device and activation dtype; None where the torch path runs."""
    kernels = _choose_mamba(config, device, dtype)
    return kernels if isinstance(kernels, MambaKernels) else None


def varlen_attention(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Callable[..., Any] | None:
    """`torch.nn.attention.varlen.varlen_attn`, or None where masked attention runs."""
    function = _choose_attention(config, device, dtype)
    return None if isinstance(function, str) else function


def paths(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The implementation of each kind of block, in words, for the log."""
    mamba = _choose_mamba(config, device, dtype)
    attention = _choose_attention(config, device, dtype)
    return {
        "mamba": f"torch ({mamba})" if isinstance(mamba, str) else "causal-conv1d, mamba-ssm",
        "attention": f"scaled_dot_product_attention, masked ({attention})"
        if isinstance(attention, str)
        else "varlen_attn; scaled_dot_product_attention where a row is one document",
        "ffn": "torch",
    }


def _choose_mamba(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> MambaKernels | str:
    """The kernels, or why not."""
    if not is_cuda(device):
        return f"on {device.type}"
    if dtype == torch.float64:
        return "the kernels have no float64"
    if config.mamba_conv_kernel > 4:
        return f"causal-conv1d has at most 4 taps, not {config.mamba_conv_kernel}"
    # Its rows are read in pieces of eight channels, from where x begins beside z.
    if config.mamba_inner_size % 8 or config.mamba_conv_size % 8:
        return (
            f"causal-conv1d wants widths that 8 divides, not {config.mamba_inner_size} and "
            f"{config.mamba_conv_size}"
        )
    return _import_mamba_kernels()


def _choose_attention(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Callable[..., Any] | str:
    """The function, or why not."""
    if not is_cuda(device):
        return f"on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"varlen_attn has no {str(dtype).removeprefix('torch.')}"
    if config.attention_head_dim % 8 or config.attention_head_dim > 256:
        return (
            "varlen_attn wants a head dim that 8 divides, at most 256, not "
            f"{config.attention_head_dim}"
        )
    return _import_varlen_attention()


def is_cuda(device: torch.device) -> bool:
    """Whether a device runs CUDA kernels."""
    return device.type == "cuda"


# A compiled package that does not fit its surroundings fails in any way when imported; the torch
# path always works, and `paths` gives the reason.


@cache
def _import_mamba_kernels() -> MambaKernels | str:
    try:
        from causal_conv1d import causal_conv1d_fn
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except Exception as error:
        return f"no mamba-ssm with causal-conv1d: {error}"
    return MambaKernels(causal_conv1d_fn, mamba_chunk_scan_combined)


@cache
def _import_varlen_attention() -> Callable[..., Any] | str:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except Exception as error:
        return f"this PyTorch has no varlen_attn: {error}"
    return varlen_attn
