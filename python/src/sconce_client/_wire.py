"""Reads what comes from a reply queue, and what the bodies of replies hold. Pure."""

from __future__ import annotations

import array
import base64
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._base import BadReply
from ._reply import Part, Reply
from .errors import of_reply

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

JSON = "application/json"


class Runs:
    """Follows the parts of one task over its runs. Drops those of earlier runs, and those that come twice."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._current: str | None = None
        self._seq = -1

    def part(self, headers: Mapping[str, Any], body: bytes, content_type: str | None) -> Part | None:
        """The part, or none if it is of an earlier run or was seen before."""
        stream_id, seq = str(headers.get("stream_id")), int(headers.get("seq", 0))
        restarted = False
        if stream_id != self._current:
            if stream_id in self._seen:
                return None
            restarted = self._current is not None
            self._seen.add(stream_id)
            self._current, self._seq = stream_id, -1
        if seq <= self._seq:
            return None
        self._seq = seq
        plain = {name: _plain(value) for name, value in headers.items()}
        return Part(body, content_type or JSON, stream_id, seq, restarted, plain)


def reply(body: bytes, content_type: str | None, correlation_id: str, headers: Mapping[str, Any] | None) -> Reply:
    """Reads a message of the type `reply`. Raises the error that it carries."""
    plain = {name: _plain(value) for name, value in (headers or {}).items()}
    try:
        status, status_code = str(plain["status"]), int(plain["status_code"])
    except (KeyError, TypeError, ValueError):
        raise BadReply(f"a reply without a status: headers {plain}") from None
    read = Reply(body, content_type or JSON, correlation_id, status, status_code, plain)
    if status != "succeeded":
        raise of_reply(read)
    return read


def _plain(value: Any) -> Any:
    """pika reads long integers as a class of its own, which prints `1` as `1L`."""
    return int(value) if isinstance(value, int) and type(value) not in (int, bool) else value


def vector(embedding: str) -> list[float]:
    """An embedding as it stands in a body: base64 of little-endian f32."""
    floats = array.array("f", base64.b64decode(embedding))
    if sys.byteorder == "big":
        floats.byteswap()
    return floats.tolist()


def matrix(embeddings: Sequence[str]) -> NDArray[numpy.float32]:
    """Embeddings as they stand in bodies, as the rows of an array."""
    import numpy

    rows = numpy.frombuffer(b"".join(map(base64.b64decode, embeddings)), dtype="<f4").astype(numpy.float32)
    return rows.reshape(len(embeddings), -1) if embeddings else rows.reshape(0, 0)


def in_order(body: Any) -> list[dict[str, Any]]:
    """The `data` of a body, in the order of the inputs."""
    data: list[dict[str, Any]] = body["data"]
    return sorted(data, key=lambda item: int(item["index"]))
