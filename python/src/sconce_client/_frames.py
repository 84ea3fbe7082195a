"""Frames of AMQP, before pika or aiormq decode them. Pure.

Whoever publishes to a reply queue chooses a message's properties. Where pika or aiormq cannot decode them, it ends the
connection, and with a queue that outlives the connection the message comes again first. So each frame with something that a
publisher chose is decoded here once for trial, and what cannot be decoded is left out of it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Callable

UNDECODABLE = "undecodable"
"""The one header of a message whose own properties could not be decoded: why not."""
START = 7
"""Bytes of a frame before its payload: the type, the channel, and the payload's size. One byte follows the payload."""
_METHOD, _HEADER = 1, 2
_DELIVER = b"\x00\x3c\x00\x3c"
_LONGEST = 16_384
"""Bytes of a frame with properties. Those of sconce have less than 1000; pamqp takes 300 ms for a table of 130,000 bytes."""
_SPARE_LEVELS = 100
"""Of the stack, left to whatever decodes and prints the frame after the trial: a table may hold tables in tables."""

Decode = Callable[[bytes], object]


class Frames:
    """A stream of bytes, cut into frames."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes of the stream. Returns all frames that are now complete, as `decodable` gives them."""
        self._rest += data
        frames = []
        while len(self._rest) > START and (end := frame_end(self._rest)) <= len(self._rest):
            frames.append(decodable(bytes(self._rest[:end]), self._decode))
            del self._rest[:end]
        return b"".join(frames)


def frame_end(start: bytes | bytearray) -> int:
    """The length of the whole frame that starts so."""
    if start[:4] == b"AMQP":  # the broker speaks another version of AMQP: these 8 bytes are all that it says
        return START + 1
    return START + int.from_bytes(start[3:START], "big") + 1


def decodable(frame: bytes, decode: Decode) -> bytes:
    """The frame itself, if `decode` takes it, or if no publisher has chosen anything in it; else one in its place."""
    payload = frame[START:-1]
    mend: Callable[[bytes, str], bytes]
    if frame[0] == _METHOD and payload[:4] == _DELIVER:
        mend = _without_names
    elif frame[0] == _HEADER:
        mend = _without_properties
    else:
        return frame
    try:
        if len(frame) > _LONGEST:
            raise ValueError(f"{len(frame)} bytes are too long")
        _try(decode, frame, _SPARE_LEVELS)
        return frame
    except Exception as error:  # noqa: BLE001 - the libraries raise errors of many kinds
        mended = mend(payload, f"{type(error).__name__}: {error}")
        return frame[:3] + struct.pack(">I", len(mended)) + mended + frame[-1:]


def _try(decode: Decode, frame: bytes, levels: int) -> None:
    if levels:
        _try(decode, frame, levels - 1)
    else:
        decode(frame)


def _without_names(payload: bytes, _: str) -> bytes:
    """A delivery without the names of its exchange and its routing key, which this client does not read."""
    tag = payload[4]
    return payload[: 5 + tag + 9] + b"\x00\x00"  # 9: the delivery tag and a bit


def _without_properties(payload: bytes, why: str) -> bytes:
    """Properties with the task's correlation_id, if there is one, and the header UNDECODABLE."""
    own, text = _correlation_id(payload[12:]), why.encode(errors="replace")[:200]
    header = struct.pack(">B11scI", len(UNDECODABLE), UNDECODABLE.encode(), b"S", len(text)) + text
    flags = 1 << 13 | (1 << 10 if own else 0)
    return payload[:12] + struct.pack(">HI", flags, len(header)) + header + own


def _correlation_id(properties: bytes) -> bytes:
    """The correlation_id as AMQP writes it, with its length before it; empty if there is none in UTF-8."""
    try:
        flags, at = int.from_bytes(properties[:2], "big"), 2
        for bit in (15, 14):  # content_type and content_encoding: short strings
            at += 1 + properties[at] if flags >> bit & 1 else 0
        if flags >> 13 & 1:  # headers: a table
            at += 4 + int.from_bytes(properties[at : at + 4], "big")
        at += (flags >> 12 & 1) + (flags >> 11 & 1)  # delivery_mode and priority: a byte each
        found = properties[at : at + 1 + properties[at]] if flags >> 10 & 1 else b""
        found[1:].decode()
        return found if not found or len(found) == 1 + found[0] else b""
    except (IndexError, UnicodeDecodeError):
        return b""


def undecodable(headers: Mapping[Any, Any] | None) -> str | None:
    """Why a message's own properties could not be decoded; none if they could."""
    why = (headers or {}).get(UNDECODABLE)
    return None if why is None else str(why)
