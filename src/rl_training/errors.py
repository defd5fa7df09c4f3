"""The one exception that means "the input was wrong": its message is one sentence for the person who gave it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A wrong command, config, file or environment; the command line prints the message and exits with 2."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The tail of an "unknown name" sentence: the nearest known name, or all of them when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
