"""Addresses of brokers, and why one of them is not reached, in words. Pure."""

from __future__ import annotations

import os
import re

VARIABLES = ("SCONCE_BROKER__URL", "AMQP_URL")
"""Where an address is looked for if none is given, in this order, as `sconce launch` does."""
_NO_VHOST = "the broker has no such virtual host, or this user may not use it"
SETTLED_AFTER = 10.0
"""Seconds for which a connection has been ready when the delays of reconnecting begin anew. Until then they go on growing:
what ended the connection so soon may end the next one."""
LOCAL = "amqp://guest:guest@127.0.0.1:5672/%2f"


def urls(url: str | None) -> list[str]:
    """The broker's addresses; several are separated by commas. Raises ValueError for what is no address."""
    text = url or next(filter(None, map(os.environ.get, VARIABLES)), LOCAL)
    # The variable may hold a list, as in a settings file.
    parts = (part.strip(" \"'[]") for part in text.split(","))
    found = [part for part in parts if part]
    for one in found:
        if not one.startswith(("amqp://", "amqps://")):
            raise ValueError(f"no address of a broker: {masked(one)!r}. One is {LOCAL!r}")
    return found


def masked(url: str) -> str:
    """An address without its password, for errors and logs."""
    return re.sub(r"(://[^:@/]*:).*@", r"\1***@", url)


def failed(failures: list[tuple[str, BaseException | None]]) -> str:
    """One line for connections that could not be made: each address and why."""
    return "no connection to " + "; to ".join(f"{masked(url)}: {cause(error)}" for url, error in failures)


def cause(error: BaseException | None) -> str:
    """What is at the bottom of an error of pika or aio-pika, in one line."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = _inner(error)
    if not seen:
        return "the connection was closed"
    error = seen[-1]
    for one in (error, *error.args):  # an error of pika, or the frame in one of aio-pika
        said = getattr(one, "reply_text", None)
        if isinstance(said, str):  # what the broker says as it closes the connection
            return said
    if isinstance(error, OSError) and error.strerror:
        # asyncio's "Connect call failed" does not say why.
        is_vague = error.strerror.startswith("Connect call failed")
        return os.strerror(error.errno) if is_vague and error.errno else error.strerror
    text = " ".join(str(error).split())
    # aio-pika does not pass on what the broker said.
    return _NO_VHOST if "Connection.OpenOk" in text else text or type(error).__name__


def _inner(error: BaseException) -> BaseException | None:
    exceptions = getattr(error, "exceptions", None) or [getattr(error, "exception", None), *error.args]
    inner = [one for one in exceptions if isinstance(one, BaseException)]
    # A CancelledError, which is no Exception, says nothing: aio-pika raises better ones from it.
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else None
    return inner[-1] if inner else cause
