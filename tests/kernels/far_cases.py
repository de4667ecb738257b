"""Kernels on the last tile of matrices of more than 2^31 elements, in the interpreter's process.

The memory is mapped, never written but for that tile, and only the program that reads it runs.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kernels.amax import Statistics, amax_and_nonfinite
from kernels.dequantize import dequantize
from kernels.matrix import Copy
from kernels.mx import quantize_mx
from kernels.nvfp4 import global_scales
from kernels.rowcol import quantize_rowcol
from kernels.weight import quantize_weight
from quant.hadamard import SIGNS

TILE = 128
MAP_NORESERVE = 0x4000  # Linux; Python's mmap names it from 3.12 on


@contextmanager
def last_program() -> Iterator[None]:
    """Launches run the last program of their grid alone, in memory that is left where it is."""
    from triton.runtime.interpreter import GridExecutor, interpreter_builder

    run, restore, empty = GridExecutor.__call__, GridExecutor._restore_args_dev, torch.empty
    set_index = type(interpreter_builder).set_grid_idx

    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        grid = tuple(self.grid) + (1,) * (3 - len(self.grid))
        self.grid = (1, 1, 1)
        last = tuple(size - 1 for size in grid)
        type(interpreter_builder).set_grid_idx = lambda builder, *_: setattr(
            builder, "grid_idx", last
        )
        return run(self, *args, **kwargs)

    GridExecutor.__call__, GridExecutor._restore_args_dev = once, lambda *_: None
    torch.empty = mapped  # type: ignore[assignment]
    try:
        yield
    finally:
        GridExecutor.__call__, GridExecutor._restore_args_dev = run, restore
        type(interpreter_builder).set_grid_idx = set_index
        torch.empty = empty


def mapped(*shape: Any, dtype: torch.dtype = torch.float32, device: object = None) -> Tensor:
    """Zeros that take no memory until they are written."""
    size = torch.Size(shape[0] if isinstance(shape[0], tuple | torch.Size) else shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, max(size.numel() * dtype.itemsize, 1), flags=flags)
    return (
        torch.frombuffer(memory, dtype=torch.uint8)[: size.numel() * dtype.itemsize]
        .view(dtype)
        .view(size)
    )


def far(tile: Tensor, elements: int = 1 << 31) -> Tensor:
    """A matrix of over 2^31 (or other) elements that ends with `tile`."""
    x = mapped(elements // tile.shape[1] + TILE, tile.shape[1], dtype=tile.dtype)
    x[-TILE:] = tile
    return x


def tail(copy: Copy | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of the last tile of a row copy."""
    assert copy is not None
    return copy.codes[-TILE:].clone(), copy.scales[-TILE:].clone()


def side(copy: Copy | None, block: int) -> tuple[Tensor, Tensor]:
    """The same of a column copy."""
    assert copy is not None
    blocks, bytes_of_block = TILE // block, copy.codes.shape[1] // copy.scales.shape[1]
    return copy.codes[:, -blocks * bytes_of_block :].clone(), copy.scales[:, -blocks:].clone()


def statistics(tile: Tensor) -> Statistics:
    with last_program():
        return amax_and_nonfinite(far(tile), SIGNS)


def rowcol(tile: Tensor, amax: Tensor) -> list[tuple[Tensor, Tensor]]:
    params = global_scales(amax, [6.0, 6.0])
    with last_program():
        row, column = quantize_rowcol(
            far(tile), row_params=params[0], column_params=params[1], signs=SIGNS
        )
    return [tail(row), side(column, 16)]


def weight(tile: Tensor, amax: Tensor) -> list[tuple[Tensor, Tensor]]:
    params = global_scales(amax[:1], [6.0])
    with last_program():
        w, transposed = quantize_weight(far(tile), params[0])
    return [tail(w), side(transposed, 16)]


def mx(tile: Tensor, column: bool, element: str) -> list[tuple[Tensor, Tensor]]:
    """Of the last 64 columns and rows: the program's own tile."""
    with last_program():
        copy = quantize_mx(far(tile), element=element, column=column)
    return [side(copy, 32) if column else tail(copy)]


def values(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """Of the last 16 rows: the program's own."""
    far_codes = far(codes)
    far_scales = far(scales.view(torch.uint8), (1 << 31) // block).view(scales.dtype)
    with last_program():
        made = dequantize(
            far_codes,
            far_scales,
            columns=codes.shape[1],
            block=block,
            global_scale=None,
            dtype=torch.bfloat16,
        )
    return made[-16:].clone()
