"""Frozen dataclasses out of plain mappings, checked key by key by the dataclasses' types."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from pipeline.config.errors import ConfigError, nearest


def build(kind: Any, value: Any, path: str) -> Any:
    """`value` as an instance of `kind`; keys, types and missing entries are checked by path."""
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(typing.cast(type, kind), value, path)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        options = [option for option in arguments if option is not type(None)]
        for option in options:
            if type(value) is option:
                return value
        return build(options[-1], value, path)
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, typing.Sequence):
            raise ConfigError(f"{path}: expected a list, got {value!r}")
        return tuple(build(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: expected names with values, got {value!r}")
        return {str(key): build(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    return _scalar(kind, value, path)


def _build_dataclass(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path or 'configuration'}: expected keys with values, got {value!r}")
    hints = typing.get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    prefix = f"{path}." if path else ""
    for key in value:
        if key not in fields:
            raise ConfigError(f"{prefix}{key}: no such key; {nearest(str(key), fields)}")
    required = (
        name
        for name, item in fields.items()
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    )
    for name in required:
        if value.get(name) is None:
            raise ConfigError(f"{prefix}{name}: missing; set {prefix}{name}=...")
    built = {key: build(hints[key], item, f"{prefix}{key}") for key, item in value.items()}
    return kind(**built)


def _scalar(kind: type, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not kind:
        raise ConfigError(f"{path}: expected {kind.__name__}, got {value!r}")
    return value
