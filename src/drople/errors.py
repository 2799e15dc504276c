"""Errors that a user can mend. The command line prints them as one paragraph and exits with 2."""

import difflib
from collections.abc import Iterable


class DropleError(Exception):
    """Something the caller gave is wrong; the message names it and says what to do."""


class OtherSettings(DropleError):
    """A run cannot go on with settings that it was not begun with."""


def unknown(what: str, given: str, known: Iterable[str]) -> DropleError:
    """The error for a name that is not in a list, with the nearest ones suggested."""
    names = sorted(known)
    near = difflib.get_close_matches(given.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it may be {', '.join(names)}."
    return DropleError(f"unknown {what} {given!r}: {hint}")
