"""The one exception that means "the input was wrong": its message is one sentence for the person who gave it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST = 380  # characters of a sentence
MOST_NAMES = 12  # listed when no name is near


class UserError(ValueError):
    """A wrong command, config, file or environment; the command line prints the message and exits with 2.

    Whatever went into the message (a path, a value, the text of another error), it is one line and not long.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        super().__init__(line if len(line) <= LONGEST else f"{line[: LONGEST - 83]}...{line[-80:]}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The tail of an "unknown name" sentence: the nearest known name, or what there is when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"known: {', '.join(names[:MOST_NAMES])}{more}"
