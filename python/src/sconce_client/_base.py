"""The two errors that replies themselves raise. All others, which may hold a reply, are in `errors`."""

from __future__ import annotations


class SconceError(Exception):
    """The base of all errors of this package."""


class BadReply(SconceError):
    """A reply that is not one of sconce's, or that is read as what it is not: audio has no JSON."""
