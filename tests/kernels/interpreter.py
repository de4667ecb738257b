"""Runs kernels in Triton's interpreter, which mends two of its conversions first.

The interpreter is chosen when Triton is imported, so a process of its own holds it. Tests call
functions there through `run`.

Triton's interpreter truncates FP32 to BF16, and rounds FP32 to E4M3 wrongly on 3 to 5% of values
that a block scale takes; both become torch's casts. `test_interpreter.py` tells when a release
mends them.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch


def pool() -> ProcessPoolExecutor:
    """A process in which Triton interprets."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_start)


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    interpreter._convert_float = convert_float
    interpreter._patch_lang = patch_once(interpreter._patch_lang)
    torch.empty = poisoned  # type: ignore[assignment]


_empty = torch.empty


def poisoned(*size: Any, **options: Any) -> torch.Tensor:
    """`torch.empty` that is not: what a kernel leaves unwritten, padding above all, shows."""
    made = _empty(*size, **options)
    if made.numel():
        made.view(-1).view(torch.uint8).fill_(0x5A)
    return made


def patch_once(patch_lang: Callable[..., Any]) -> Callable[..., Any]:
    """`_patch_lang` that patches each module of Triton's language once in a run of a kernel.

    Triton's does it anew at each call of a function, which takes most of a test's time.
    """
    from triton import language

    patched: set[str] = set()

    def patch(fn: Any) -> Any:
        values = list(fn.__globals__.values())
        wanted = {m.__name__ for m in (language, language.core) if any(v is m for v in values)}
        if patched and wanted <= patched:
            return None
        starts = not patched
        patched.update(wanted)
        scope = patch_lang(fn)
        if starts:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    return patch


def call(function: str, args: tuple, kwargs: dict) -> Any:
    """Runs `module:function` in this process."""
    module, name = function.split(":")
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


def runner(executor: ProcessPoolExecutor) -> Callable[..., Any]:
    """What the fixture `interpreted` gives: `run("module:function", *args, **kwargs)`."""

    def run(function: str, *args: Any, **kwargs: Any) -> Any:
        return executor.submit(call, function, args, kwargs).result()

    return run


def convert_float(values: Any, source: Any, result: Any, rounding_mode: Any) -> Any:
    """`triton.runtime.interpreter._convert_float`, by torch's casts, on arrays of raw bits."""
    import numpy as np

    types = {
        "fp32": (torch.float32, np.int32),
        "fp16": (torch.float16, np.int16),
        "bf16": (torch.bfloat16, np.int16),
        "fp8e4nv": (torch.float8_e4m3fn, np.int8),
        "fp8e5": (torch.float8_e5m2, np.int8),
    }
    source_type, source_bits = types[source.name]
    result_type, result_bits = types[result.name]
    bits = np.ascontiguousarray(values).view(source_bits)
    converted = torch.from_numpy(bits.copy()).view(source_type).to(result_type)
    raw = torch.from_numpy(np.zeros(0, result_bits)).dtype
    unsigned = np.dtype(result_bits).str.replace("i", "u")
    return converted.view(raw).numpy().view(unsigned).reshape(values.shape)
