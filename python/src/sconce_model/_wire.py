"""Frames between a worker and this process, over a socket: the length of a header, the header as JSON, and raw buffers."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NoReturn

from ._errors import short_traceback

VERSION = 1
"""Of the messages. A worker that speaks another version is refused."""
_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
# The bounds of a frame, as in src/python/frames.rs: bytes of a header, number of buffers, bytes of all buffers.
_MAX_HEADER, _MAX_BUFFERS, _MAX_BYTES = 16 << 20, 65_536, 1 << 30


def end_process(why: str = "") -> NoReturn:
    """Ends the process at once, whatever the class's threads do. `why` is logged, and the exit status is then 1."""
    if why:
        print(f"sconce_model: {why}", file=sys.stderr, flush=True)
    os._exit(1 if why else 0)


def encode(type_: str, buffers: Sequence[bytes] = (), **fields: Any) -> bytes:
    """A frame. Raises `ValueError` if it is larger than the worker takes."""
    sizes = [len(one) for one in buffers]
    if len(sizes) > _MAX_BUFFERS or sum(sizes) > _MAX_BYTES:
        raise ValueError(f"{len(sizes)} buffers of {sum(sizes)} bytes are more than the worker takes")
    # The message of an error may hold half a surrogate pair, which UTF-8 cannot encode. A question mark takes its place.
    header = _to_json({"type": type_, **fields, "buffers": sizes}).encode(errors="replace")
    return b"".join([struct.pack("<I", len(header)), header, *buffers])


class Channel:
    """One of the two sockets. One thread reads it, and one thread writes to it."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._input = self._socket.makefile("rb", 1 << 16)

    def read(self) -> dict[str, Any]:
        """The header of the next frame, with the buffers in its field `buffers`. If the worker has closed the channel, the
        process ends."""
        (length,) = struct.unpack("<I", self._read_exactly(4))
        if not 1 <= length <= _MAX_HEADER:
            end_process(f"a frame of the worker has a header of {length} bytes")
        try:
            frame: dict[str, Any] = json.loads(self._read_exactly(length))
            sizes = frame.get("buffers", [])
            is_bounded = len(sizes) <= _MAX_BUFFERS and min(sizes, default=0) >= 0 and sum(sizes) <= _MAX_BYTES
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            end_process(f"a frame of the worker cannot be read: {error}")
        if not is_bounded:
            end_process(f"a frame of the worker has {len(sizes)} buffers of {sum(sizes)} bytes")
        frame["buffers"] = [self._read_exactly(size) for size in sizes]
        return frame

    def _read_exactly(self, size: int) -> bytes:
        data: bytes = self._input.read(size)
        if len(data) < size:
            end_process()
        return data

    def write(self, frame: bytes) -> None:
        """Sends a frame, and waits while the socket is full. If the worker has closed the channel, the process ends."""
        try:
            self._socket.sendall(frame)
        except OSError:
            end_process()

    def serve(self, answers: Mapping[str, Callable[[dict[str, Any]], bytes | None]]) -> NoReturn:
        """Answers each frame of the worker by its type, until the worker closes the channel."""
        try:
            while True:
                frame = self.read()
                if frame["type"] not in answers:
                    end_process(f"the worker sent {frame['type']!r}")
                if answer := answers[frame["type"]](frame):
                    self.write(answer)
        except BaseException as error:  # noqa: BLE001 - on a thread it would end this thread alone, and the worker would wait
            end_process(short_traceback(error))
