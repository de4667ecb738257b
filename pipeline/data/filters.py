"""Filters of a source: which documents are left out by their length or by another column.

A filter is written as a column, a comparison and a value: `score >= 3`, `language == en`.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config import ConfigError, SourceConfig

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(r"\s*([\w.-]+)\s*(==|!=|>=|<=|>|<)\s*(.+?)\s*")


@dataclass(frozen=True)
class Filter:
    """Keeps a record whose column compares so with the value."""

    column: str
    comparison: str
    value: Any

    def keeps(self, record: Mapping[str, Any]) -> bool:
        """False as well where the column is missing, null, or of a kind that does not compare."""
        found = record.get(self.column)
        try:
            return found is not None and _COMPARISONS[self.comparison](found, self.value)
        except TypeError:
            return False


def filters_of(source: SourceConfig, key: str) -> tuple[Filter, ...]:
    """The source's filters. Raises `ConfigError` for one that cannot be read."""
    found = []
    for text in source.filters:
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"{key}.filters: {text!r} is no filter; write column, comparison "
                f"({', '.join(_COMPARISONS)}) and value, such as 'score >= 3'"
            )
        column, comparison, value = match.groups()
        try:
            found.append(Filter(column, comparison, json.loads(value)))
        except ValueError:
            found.append(Filter(column, comparison, value))
    return tuple(found)


def has_length(text: str, source: SourceConfig) -> bool:
    """Whether the text has at least and at most as many characters as configured."""
    least, most = source.min_chars or 0, source.max_chars
    return least <= len(text) and (most is None or len(text) <= most)
