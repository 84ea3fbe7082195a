"""Errors: the one that refuses a task, the one of a class that somebody must mend, and what is told of any other."""

from __future__ import annotations

import errno
import sys
import traceback
from pathlib import Path
from typing import Any

FRAMES, LONGEST = 8, 4000
_HERE = str(Path(__file__).parent)


class TaskError(Exception):
    """Refuses a task, or one of its inputs: the requester gets the message, and the task is not tried again."""

    # Those of a subclass that does not call `__init__`.
    status, message, param = 400, "", None

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        """`status` is from 400 to 499; the reply has 404, 408 or 413, and 400 for all others. `param` names the field at fault."""
        super().__init__(message)
        if not 400 <= int(status) <= 499:
            raise ValueError(f"the status of a TaskError is from 400 to 499, not {status}; for a fault, raise another exception")
        path = param if isinstance(param, (list, tuple)) else (param,)  # pydantic's `loc` is a tuple
        self.status, self.message = int(status), str(message)
        self.param = None if param is None else ".".join(map(str, path))


class ClassProblem(Exception):
    """The class, its module or its settings are wrong: somebody must mend them, and until then no start helps."""


def last_line(error: BaseException) -> str:
    """What Python prints last: the type and the message."""
    lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    notes = sum(len(str(note).splitlines()) for note in getattr(error, "__notes__", ()))  # which stand behind the message
    return _cut(" ".join(lines[max(len(lines) - notes - 1, 0)].split()), 1000)


def place(error: BaseException) -> str:
    """The innermost line outside this package where it was raised, as ` (FILE:LINE)`; nothing if there is none."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    frames = [it for it in traceback.extract_tb(error.__traceback__) if not it.filename.startswith((_HERE, "<frozen"))]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def short_traceback(error: BaseException) -> str:
    """The innermost frames, without those of this package."""
    frames = [it for it in traceback.extract_tb(error.__traceback__) if not it.filename.startswith((_HERE, "<frozen"))]
    lines = [*traceback.format_list(frames[-FRAMES:]), *traceback.format_exception_only(type(error), error)]
    if cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        lines.append(f"which was raised because of {last_line(cause)}{place(cause)}\n")
    return _cut("".join(lines).rstrip(), LONGEST)


def told(error: BaseException) -> dict[str, Any]:
    """An exception, as the worker is told of it. The traceback of one that is nobody's intention goes to the log."""
    if isinstance(error, TaskError):
        message = error.message or str(error) or type(error).__name__
        return {"kind": "task", "status": error.status, "message": _cut(message, LONGEST), "param": error.param}
    print(short_traceback(error), file=sys.stderr, flush=True)
    kind = "out_of_memory" if is_out_of_memory(error) else "error"
    return {"kind": kind, "message": last_line(error)}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


_LASTING = (ClassProblem, ImportError, SyntaxError, TypeError, AttributeError, NameError, LookupError, AssertionError, NotImplementedError)
"""Mistakes of the code. A library's ValueError, RuntimeError or OSError may pass: half a download, a busy card, a network."""


def is_lasting(error: BaseException) -> bool:
    """Whether a model whose import or `load` has raised this error would do so at each start, until somebody mends it."""
    # The hub's error for a network that is down is a `FileNotFoundError` too, but not the system's.
    is_missing = isinstance(error, FileNotFoundError) and error.errno == errno.ENOENT
    return is_missing or isinstance(error, _LASTING)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had too little memory, by PyTorch's error, or this process."""
    # Never imported here: a class that has not imported it cannot raise its error.
    kind = getattr(getattr(sys.modules.get("torch"), "cuda", None), "OutOfMemoryError", None)
    return isinstance(error, (kind, MemoryError) if isinstance(kind, type) else MemoryError)
