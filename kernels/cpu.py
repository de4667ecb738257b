"""The compiled CPU kernels: `cpu*.cpp`, built once by the system's compiler, loaded with ctypes.

The library is cached by a hash of the source, the compiler and the CPU, and renamed into place, so
processes may race. Where no compiler works, `available` is False, a warning says so once, and the
callers run plain torch instead.

Legend: R rows, K columns, B blocks in a row, T tokens.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SOURCES = tuple(Path(__file__).with_name(f"cpu{part}.cpp") for part in ("", "_rows", "_transpose"))
_HEADERS = tuple(Path(__file__).with_name(f"cpu_{part}.h") for part in ("bf16", "vectors"))
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fwrapv", "-shared", "-fPIC")
_DTYPES = {torch.bfloat16: 0, torch.float32: 1}
_ELEMENTS = {"e2m1": 0, "e4m3": 1}

_log = logging.getLogger(__name__)


def available() -> bool:
    """Whether the kernels are, or could now be, built and loaded."""
    return _load()[0] is not None


def reason() -> str:
    """Why the kernels are not available; empty if they are."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    try:
        return _declare(ctypes.CDLL(str(_build()))), ""
    except (OSError, RuntimeError) as error:
        _log.warning("no compiled CPU kernels, plain torch and numpy instead: %s", error)
        return None, str(error)


def _build() -> Path:
    """The path of the library, compiled if it is not in the cache.

    Raises:
        RuntimeError: no compiler, or none of the attempts compiled.
    """
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler on PATH (c++, g++ or clang++): install one")
    folder = _cache_folder()
    library = folder / f"cpu-{_fingerprint(compiler)}.so"
    if library.exists():
        return library
    errors = []
    for openmp in (("-fopenmp",), ()):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / "cpu.so"
            command = [compiler, *_FLAGS, *openmp, *map(str, _SOURCES), "-o", str(built)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode == 0:
                os.replace(built, library)
                return library
            errors.append(run.stderr.strip()[-500:])
    raise RuntimeError(f"{compiler} could not build the CPU kernels: {errors[0]}")


def _cache_folder() -> Path:
    """A folder of this user's that can be written: the cache folder, else a fresh temporary one."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "nvfp4-pretrain"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="nvfp4-pretrain-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp())


def _fingerprint(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    sources = (path.read_text() for path in (*_SOURCES, *_HEADERS))
    parts = (*sources, " ".join(_FLAGS), compiler, version.stdout, _cpu())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """What `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    lines = (line for line in info.read_text().splitlines() if line.startswith(wanted))
    return "\n".join(sorted(set(lines)))


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer, long, real = (
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_float,
    )
    # fmt: off
    signatures: dict[str, list[Any]] = {
        "quantize": [
            pointer, integer, long, long, integer, integer, integer, integer, integer,
            pointer, long, pointer, pointer, integer,
        ],
        "quantize_nvfp4": [
            pointer, integer, long, long, integer, integer, pointer, real, real, pointer, long,
            pointer, pointer, pointer, integer,
        ],
        "dequantize": [
            pointer, pointer, integer, integer, integer, long, long, real, integer, pointer,
            integer,
        ],
        "global_scales": [pointer, real, real, pointer],
        "amax_and_nonfinite": [pointer, integer, long, pointer, pointer, integer],
        "read_ranges": [pointer, long, long, pointer, pointer],
        "lay_out_rows": [
            pointer, integer, long, long, long, long, long, pointer, pointer, pointer,
        ],
        "transpose_codes": [pointer, long, long, pointer, integer],
        "rht_transpose": [
            pointer, integer, long, long, integer, pointer, pointer, pointer, pointer, integer,
        ],
    }
    # fmt: on
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def _library() -> ctypes.CDLL:
    library = _load()[0]
    assert library is not None, "callers ask available() first"
    return library


def _prepare(x: Tensor) -> tuple[Tensor, int]:
    """`x` as the kernels read it, contiguous BF16 or FP32, and the number of that dtype."""
    x = x.detach()
    if x.dtype not in _DTYPES:
        x = x.float()
    return x.contiguous(), _DTYPES[x.dtype]


def _scale_kind(scale: str, scale_rounding: str) -> int:
    if scale == "fp32":
        return 3 if scale_rounding == "nearest" else 2
    return {"e4m3": 0, "e8m0": 1}[scale]


def amax_and_nonfinite(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest magnitude of `x`, passing over NaN (FP32 scalar); count of NaN and infinity (int64).

    Args:
        x: BF16, FP16 or FP32 on the CPU, any shape.
    """
    x, dtype = _prepare(x)
    amax, nonfinite = torch.empty((), dtype=torch.float32), torch.empty((), dtype=torch.int64)
    _library().amax_and_nonfinite(
        x.data_ptr(),
        dtype,
        x.numel(),
        amax.data_ptr(),
        nonfinite.data_ptr(),
        torch.get_num_threads(),
    )
    return amax, nonfinite


def global_scales(amax: Tensor, *, largest_code: float) -> tuple[Tensor, ...]:
    """The five FP32 scalars of `quant.reference.GlobalScales`, in its order."""
    out = torch.empty(5, dtype=torch.float32)
    _library().global_scales(amax.data_ptr(), 448 * largest_code, 1 / largest_code, out.data_ptr())
    return out.unbind()


def quantize(
    x_RK: Tensor,
    *,
    element: str,
    block: tuple[int, int],
    scale: str,
    scale_dtype: torch.dtype,
    scale_rounding: str,
    random: Sequence[int] | None,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """Codes and plain block scales of a matrix in a format without a global scale.

    Args:
        x_RK: BF16, FP16 or FP32 on the CPU; an even K where element is "e2m1".
        element, block, scale, scale_dtype, scale_rounding: as in `quant.formats.Format`.
        random: two key words and three counter words of Philox, or None for nearest rounding.
        offset: index of the first element in the counters.

    Returns:
        uint8 [R, K/2] or [R, K], and the scales [R, B].
    """
    x_RK, dtype = _prepare(x_RK)
    rows, columns = x_RK.shape
    bits = 4 if element == "e2m1" else 8
    codes = torch.empty(rows, columns * bits // 8, dtype=torch.uint8)
    scales = torch.empty(rows, -(-columns // block[1]), dtype=scale_dtype)
    words = None if random is None else (ctypes.c_uint32 * 5)(*random)
    _library().quantize(
        x_RK.data_ptr(),
        dtype,
        rows,
        columns,
        _ELEMENTS[element],
        _scale_kind(scale, scale_rounding),
        int(scale_rounding == "up"),
        *block,
        words,
        offset,
        codes.data_ptr(),
        scales.data_ptr(),
        torch.get_num_threads(),
    )
    return codes, scales


def quantize_nvfp4(
    x_RK: Tensor,
    *,
    block: tuple[int, int],
    amax: Tensor | None,
    largest_code: float,
    random: Sequence[int] | None,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, plain block scales and the decode scale of a matrix in NVFP4, from one call.

    Args:
        x_RK, block, random, offset: as in `quantize`.
        amax: FP32 scalar on the CPU that the global scale is made from; None takes x's own.
        largest_code: as in `global_scales`.

    Returns:
        uint8 [R, K/2], float8_e4m3fn [R, B], FP32 scalar.
    """
    x_RK, dtype = _prepare(x_RK)
    rows, columns = x_RK.shape
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(rows, -(-columns // block[1]), dtype=torch.float8_e4m3fn)
    decode = torch.empty((), dtype=torch.float32)
    _library().quantize_nvfp4(
        x_RK.data_ptr(),
        dtype,
        rows,
        columns,
        *block,
        None if amax is None else amax.data_ptr(),
        448 * largest_code,
        1 / largest_code,
        None if random is None else (ctypes.c_uint32 * 5)(*random),
        offset,
        codes.data_ptr(),
        scales.data_ptr(),
        decode.data_ptr(),
        torch.get_num_threads(),
    )
    return codes, scales, decode


def dequantize(
    codes_RK: Tensor,
    scales_RB: Tensor,
    *,
    element: str,
    block: tuple[int, int],
    scale: str,
    columns: int,
    global_scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """The values [R, K] of codes with their scales, times `global_scale`, rounded to `dtype`."""
    codes_RK, scales_RB = codes_RK.contiguous(), scales_RB.contiguous()
    out_dtype = dtype if dtype in _DTYPES else torch.float32
    out = torch.empty(codes_RK.shape[0], columns, dtype=out_dtype)
    _library().dequantize(
        codes_RK.data_ptr(),
        scales_RB.data_ptr(),
        _ELEMENTS[element],
        _scale_kind(scale, "nearest"),
        block[1],
        out.shape[0],
        columns,
        global_scale,
        _DTYPES[out_dtype],
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out.to(dtype)


def transpose_codes(codes: Tensor) -> Tensor:
    """Packed 4-bit codes [R, K/2] as those of the transpose [K, R/2]; R even."""
    codes = codes.contiguous()
    rows, half = codes.shape
    out = torch.empty(2 * half, rows // 2, dtype=torch.uint8)
    _library().transpose_codes(
        codes.data_ptr(), rows, 2 * half, out.data_ptr(), torch.get_num_threads()
    )
    return out


def rht_transpose(
    x_TK: Tensor, signs: Sequence[int]
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """The RHT along the tokens in tiles of `len(signs)` (16 or 32), transposed.

    Returns:
        BF16 [K, T rounded up to whole tiles]; the amax of x and of the result (FP32 scalars); the
        count of x's NaN and infinity (int64 scalar).
    """
    x_TK, dtype = _prepare(x_TK)
    tokens, columns = x_TK.shape
    size = len(signs)
    y_KT = torch.empty(columns, -(-tokens // size) * size, dtype=torch.bfloat16)
    amax, nonfinite = torch.empty(2, dtype=torch.float32), torch.empty((), dtype=torch.int64)
    _library().rht_transpose(
        x_TK.data_ptr(),
        dtype,
        tokens,
        columns,
        size,
        (ctypes.c_float * size)(*signs),
        y_KT.data_ptr(),
        amax.data_ptr(),
        nonfinite.data_ptr(),
        torch.get_num_threads(),
    )
    return y_KT, (amax[0], amax[1]), nonfinite


def read_ranges(place_K4: NDArray[np.int64], out: NDArray[Any]) -> NDArray[np.bool_]:
    """Copy ranges of mapped files into the rows of `out`; which of them are as written [K].

    Args:
        place_K4: contiguous; of each range the address of its file in memory, or 0 for none; the
            file's bytes; the address of the sums of its blocks (`pipeline.data.blocks`); where in
            the file the range begins, in bytes. Who calls keeps the files mapped.
        out: contiguous [K, elements]; a range is as long as a row.
    """
    assert place_K4.flags.c_contiguous
    assert out.flags.c_contiguous
    assert len(place_K4) == len(out)
    intact_K = np.empty(len(place_K4), np.bool_)
    _library().read_ranges(
        place_K4.ctypes.data,
        len(place_K4),
        out.shape[1] * out.itemsize,
        out.ctypes.data,
        intact_K.ctypes.data,
    )
    return intact_K


def lay_out_rows(
    ids_UT: NDArray[np.unsignedinteger],
    row_length: int,
    eos_id: int,
    label_at_end: int | None,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Cut units of token ids into rows: ids, labels and document numbers in one pass.

    Args:
        ids_UT: uint16 or uint32 [U, T + 1], contiguous; a unit's last id is a label alone.
        row_length: divides T.
        label_at_end: what a document's last id (`eos_id`) has as its label; None: what follows.
        out: int64, int64 and int32, each contiguous and of U * T elements.
    """
    assert ids_UT.flags.c_contiguous
    units, stored = ids_UT.shape
    _library().lay_out_rows(
        ids_UT.ctypes.data,
        ids_UT.itemsize,
        units,
        stored - 1,
        row_length,
        eos_id,
        0 if label_at_end is None else label_at_end,
        *(tensor.data_ptr() for tensor in out),
    )
