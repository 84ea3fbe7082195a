"""The two errors that replies themselves raise. All others, which may hold a reply, are in `errors`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SconceError(Exception):
    """The base of all errors of this package."""


class BadReply(SconceError):
    """A reply that is not one of sconce's, or that is read as what it is not: audio has no JSON."""


UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading raises if a value is of another type, too deep, too large, or missing."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Makes a BadReply of what reading a reply raises: whoever can publish to the reply queue chooses all that is in it."""
    try:
        yield
    except UNREADABLE as error:
        raise BadReply(f"{what} cannot be read: {type(error).__name__}: {error}") from None
