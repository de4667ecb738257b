"""Keeping torch.compile out of functions that are written for eager execution."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, run as written where the code around it is compiled.

    As ``torch.compiler.disable``, which is not called before someone compiles: importing the
    compiler takes seconds.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def eager(*args: Any, **named: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **named)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **named)

    return eager
