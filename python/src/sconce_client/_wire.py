"""Reads what comes from a reply queue, and what the bodies of replies hold. Pure."""

from __future__ import annotations

import array
import base64
import logging
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._base import BadReply, reading
from ._frames import undecodable
from ._reply import Part, Reply
from .errors import of_reply

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

LOG = logging.getLogger("sconce_client")
JSON = "application/json"


class Runs:
    """Follows the parts of one task over its runs. Drops those of earlier runs, and those that come twice."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._current: str | None = None
        self._seq = -1

    def part(self, headers: Mapping[str, Any], body: bytes, content_type: str | None) -> Part | None:
        """The part, or none if it is of an earlier run or was seen before. Raises BadReply for what is no part."""
        with reading("a part"):
            plain = _headers(headers)
            stream_id, seq = str(plain.get("stream_id")), int(plain.get("seq", 0))
            content_type = _media_type(content_type)
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
        return Part(body, content_type, stream_id, seq, restarted, plain)


def reply(body: bytes, content_type: str | None, correlation_id: str, headers: Mapping[str, Any] | None) -> Reply:
    """Reads a message of the type `reply`. Raises the error that it carries, or BadReply for what is no reply."""
    plain = _headers(headers)
    status, status_code = plain.get("status"), plain.get("status_code")
    if not isinstance(status, str) or not isinstance(status_code, int):
        raise BadReply(f"a reply without a status: headers {reprlib.repr(plain)}")
    read = Reply(body, _media_type(content_type), correlation_id, status, status_code, plain)
    if status != "succeeded":
        raise of_reply(read)
    return read


def warn_of_undecodable(headers: Mapping[str, Any] | None, queue: str | None) -> None:
    """Says so, if a message that is dropped is one that cannot be decoded. No task tells of it: it belongs to none."""
    why = undecodable(headers)
    if why is not None:
        where = f"the reply queue {queue!r}" if queue else "the client's own reply queue"
        LOG.warning("dropped a message of %s: its properties cannot be decoded: %s", where, why)


def _headers(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    why = undecodable(headers)
    if why is not None:
        raise BadReply(f"a reply whose properties cannot be decoded: {why}")
    return {name: _plain(value) for name, value in (headers or {}).items()}


def _media_type(content_type: str | None) -> str:
    if isinstance(content_type, bytes):  # by pika, if it is not UTF-8
        raise BadReply(f"a reply with the content_type {content_type!r}")
    return content_type or JSON


def _plain(value: Any) -> Any:
    """pika reads long integers as a class of its own, which prints `1` as `1L`."""
    return int(value) if isinstance(value, int) and type(value) not in (int, bool) else value


def vector(embedding: str) -> list[float]:
    """An embedding as it stands in a body: base64 of little-endian f32."""
    floats = array.array("f", base64.b64decode(embedding, validate=True))
    if sys.byteorder == "big":
        floats.byteswap()
    return floats.tolist()


def matrix(embeddings: Sequence[str]) -> NDArray[numpy.float32]:
    """Embeddings as they stand in bodies, as the rows of an array."""
    import numpy

    raw = [base64.b64decode(embedding, validate=True) for embedding in embeddings]
    if len(set(map(len, raw))) > 1:
        raise BadReply("the vectors differ in length")
    rows = numpy.frombuffer(b"".join(raw), dtype="<f4").astype(numpy.float32)
    return rows.reshape(len(embeddings), -1) if embeddings else rows.reshape(0, 0)


def in_order(body: Any) -> list[dict[str, Any]]:
    """The `data` of a body, in the order of the inputs: one item for each. Raises BadReply, or what `reading` takes."""
    data: list[dict[str, Any]] = sorted(body["data"], key=lambda item: int(item["index"]))
    if [item["index"] for item in data] != list(range(len(data))):
        raise BadReply("the reply does not have one item for each input")
    return data
