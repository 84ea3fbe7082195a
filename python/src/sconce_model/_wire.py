"""Frames between a worker and this process, over a socket: a header of JSON, and buffers."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

VERSION = 1
_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_LONGEST_HEADER, _MOST_BUFFERS, _MOST_BYTES = 16 << 20, 65_536, 1 << 30


def quit(why: str = "") -> NoReturn:
    """Ends the process at once, whatever the class's threads do: with 1 and a line in the log, or with 0 if the worker is gone."""
    if why:
        print(f"sconce_model: {why}", file=sys.stderr, flush=True)
    os._exit(1 if why else 0)


def header_length(start: bytes) -> int:
    """That of the header, from the first four bytes of a frame."""
    (length,) = struct.unpack("<I", start)
    if not 1 <= length <= _LONGEST_HEADER:
        quit(f"a frame of the worker has a header of {length} bytes")
    return int(length)


def header(data: bytes) -> dict[str, Any]:
    """A header; its field `buffers` is a list of lengths."""
    try:
        found = json.loads(data)
        sizes = found.setdefault("buffers", [])
        is_good = len(sizes) <= _MOST_BUFFERS and all(size >= 0 for size in sizes) and sum(sizes) <= _MOST_BYTES
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        quit(f"a frame of the worker cannot be read: {error}")
    if not is_good:
        quit(f"a frame of the worker has {len(sizes)} buffers of {sum(sizes)} bytes")
    frame: dict[str, Any] = found
    return frame


def written(type_: str, buffers: Sequence[bytes] = (), **fields: Any) -> bytes:
    """A frame. Raises `ValueError` if it is larger than the worker takes."""
    sizes = [len(one) for one in buffers]
    if len(sizes) > _MOST_BUFFERS or sum(sizes) > _MOST_BYTES:
        raise ValueError(f"{len(sizes)} buffers of {sum(sizes)} bytes are more than the worker takes")
    # An error may quote half a surrogate pair, which is no JSON: the worker gets a question mark.
    head = _to_json({"type": type_, **fields, "buffers": sizes}).encode(errors="replace")
    return b"".join([struct.pack("<I", len(head)), head, *buffers])


class Channel:
    """One socket, used by one thread."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self.socket = socket.socket(fileno=fd)
        self._input = self.socket.makefile("rb", 1 << 16)

    def read(self) -> dict[str, Any]:
        """The next frame, with its buffers in the place of their lengths. Ends the process with the worker."""
        frame = header(self._exactly(header_length(self._exactly(4))))
        frame["buffers"] = [self._exactly(size) for size in frame["buffers"]]
        return frame

    def _exactly(self, size: int) -> bytes:
        data: bytes = self._input.read(size)
        if len(data) < size:
            quit()
        return data

    def write(self, frame: bytes) -> None:
        """Sends a frame."""
        try:
            self.socket.sendall(frame)
        except OSError:
            quit()
