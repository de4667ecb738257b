"""What a user's mistake raises, and the nearest names that are known."""

from __future__ import annotations

import difflib
import typing


class ConfigError(ValueError):
    """A mistake of the user's: the message names the key, the cause and the way out."""


class UnreachableError(ConfigError):
    """Something outside does not answer, or not yet: a job runner may try again."""


class PermanentError(RuntimeError):
    """A failure that trying again would repeat: a job runner must not retry it."""


class IncompleteError(RuntimeError):
    """Done, but for parts that could not be had; the message names them."""


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """' Did you mean a, b?', or the list of all that is known when nothing is near."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
