"""Errors: the one that refuses a task, the one that the author or the operator must act on, and how others are reported."""

from __future__ import annotations

import errno
import sys
import traceback
from pathlib import Path
from typing import Any

_MAX_FRAMES, _MAX_LETTERS = 8, 4000
_PACKAGE = str(Path(__file__).parent)


class TaskError(Exception):
    """Refuses a task, or one of its inputs: the requester gets the message, and the task is not tried again."""

    # For subclasses whose `__init__` does not call this one.
    status, message, param = 400, "", None

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        """`status` is from 400 to 499. The reply has 404, 408 or 413 if it is one of these, and otherwise 400. `param` names
        the field at fault."""
        super().__init__(message)
        if not 400 <= int(status) <= 499:
            raise ValueError(f"the status of a TaskError is from 400 to 499, not {status}; for a fault, raise another exception")
        path = param if isinstance(param, (list, tuple)) else (param,)  # pydantic's `loc` is a tuple
        self.status, self.message = int(status), str(message)
        self.param = None if param is None else ".".join(map(str, path))


class ClassProblem(Exception):
    """The class, its module or its settings are wrong. Starting again does not help until somebody has mended them."""


def failure_of(error: BaseException) -> dict[str, Any]:
    """The fields that report an exception to the worker. Logs the traceback, except that of a `TaskError`."""
    if isinstance(error, TaskError):
        message = error.message or str(error) or type(error).__name__
        return {"kind": "task", "status": error.status, "message": _shorten(message, _MAX_LETTERS), "param": error.param}
    print(short_traceback(error), file=sys.stderr, flush=True)
    return {"kind": "out_of_memory" if _is_out_of_memory(error) else "error", "message": last_line(error)}


def last_line(error: BaseException) -> str:
    """The type and the message, as at the end of a traceback, in one line."""
    lines = traceback.format_exception_only(type(error), error)
    # Of a syntax error the code stands before this line, indented. Notes follow it.
    line = next(line for line in lines if not line.startswith(" "))
    return _shorten(" ".join(line.split()), 1000)


def location(error: BaseException) -> str:
    """The innermost line outside this package from which the error was raised, as ` (FILE:LINE)`; empty if there is none."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    frames = [it for it in traceback.extract_tb(error.__traceback__) if not it.filename.startswith((_PACKAGE, "<frozen"))]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def short_traceback(error: BaseException) -> str:
    """The traceback with the innermost frames, and those of the causes."""
    lines = traceback.format_exception(type(error), error, error.__traceback__, -_MAX_FRAMES)
    return _shorten("".join(lines).rstrip(), _MAX_LETTERS)


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


_LASTING = (
    *(ClassProblem, ImportError, SyntaxError, TypeError, AttributeError),
    *(NameError, LookupError, AssertionError, NotImplementedError),
)


def is_lasting(error: BaseException) -> bool:
    """Whether an error of the import or of `load` is a mistake of the code or a missing file, and so comes again at each start.
    A ValueError, RuntimeError or OSError of a library may pass: half a download, a busy card, a network that is down."""
    # The hub's error for a network that is down is a `FileNotFoundError`, too, but has no `errno`.
    is_missing = isinstance(error, FileNotFoundError) and error.errno == errno.ENOENT
    return is_missing or isinstance(error, _LASTING)


def _is_out_of_memory(error: BaseException) -> bool:
    # PyTorch is not imported here, since a class that has not imported it cannot raise its error.
    torch_error = getattr(getattr(sys.modules.get("torch"), "cuda", None), "OutOfMemoryError", None)
    return isinstance(error, (torch_error, MemoryError) if isinstance(torch_error, type) else MemoryError)
