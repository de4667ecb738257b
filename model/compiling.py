"""Keeping torch.compile out of functions that are written for eager execution."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_pending: list[Callable[[], None]] = []


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, run as written in compiled code once ``keep_outside`` has been called."""
    chosen = [function]

    def disable() -> None:
        chosen[0] = torch.compiler.disable(function)

    @functools.wraps(function)
    def eager(*args: Any, **named: Any) -> Any:
        return chosen[0](*args, **named)

    _pending.append(disable)
    return eager


def keep_outside() -> None:
    """Call this before anything is compiled. Not at import: the compiler's import takes seconds."""
    while _pending:
        _pending.pop()()
