"""The process of a worker's model. The worker starts it, and asks it over two sockets: the model channel, for batches and
streams, and the side channel, for what is done beside them. It holds the class, and the inputs and outputs of tasks; it forms no
batches and knows no queue."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ._class import find_class, gives_numbers, load, options_from, options_of, probe_of, routes, type_name
from ._errors import ClassProblem, is_lasting, last_line, location, short_traceback
from ._model import Model, Worker
from ._streams import Streams
from ._tasks import Tasks
from ._wire import VERSION, Channel, encode

DTYPES = {"auto": "float32", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
"""PyTorch's names of the dtypes of a pool, if they differ."""


def description(model: type[Model], options: Any) -> dict[str, Any]:
    """What the worker must know of a class."""
    return {
        "package": import_module("sconce_client").__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "urls": [{"url": url, "media_types": types} for url, types in routes(model).items()],
        "options": [
            {"name": name, "type": type_name(option.type), "value": getattr(options, name)}
            for name, option in options_of(model).items()
        ],
        "work": "streams" if hasattr(model, "stream") else "batches",
        "gives_numbers": gives_numbers(model),
        "has_preprocess": model.preprocess is not Model.preprocess,
        "concurrency": options.concurrency if hasattr(model, "stream") else 1,
    }


@contextmanager
def step(channel: Channel, name: str) -> Iterator[None]:
    """A step on the way to a model. If it fails, the worker is told why, and the process ends."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - whatever the class raises, also SystemExit
        message = str(error)
        if not isinstance(error, ClassProblem):
            print(short_traceback(error), file=sys.stderr, flush=True)
            message = f"{name}: {last_line(error)}{location(error)}"
        channel.write(encode("failed", kind="operator" if is_lasting(error) else "model", message=message))
        os._exit(1)


def main() -> None:
    """Loads the model that the worker's first frame names, then serves until the worker closes a channel."""
    try:
        channel, side_channel = Channel(3), Channel(4)
    except OSError:
        sys.exit("sconce_model is started by a worker of sconce; to try a class, call sconce_model.testing.run")
    start = channel.read()
    with step(channel, "import"):
        if start.get("version") != VERSION:
            raise ClassProblem(f"sconce speaks version {start.get('version')} with a model in Python, and sconce_model {VERSION}")
        kind = find_class(start["file"] or start["module"], start["class"])
        channel.write(encode("described", **description(kind, options_from(kind, start["options"]))))
    if start["mode"] == "describe":
        os._exit(0)
    with step(channel, "load"):
        worker = Worker(**{name: start[name] for name in Worker.__dataclass_fields__})
        device = "cpu" if start["device"] == "cpu" else "cuda:0"
        model = load(kind, device, DTYPES.get(start["dtype"], start["dtype"]), start["options"], worker)
        probe = probe_of(model)
    about = {"url": probe.url, "content_type": probe.content_type} if probe else None
    channel.write(encode("ready", [probe.body] if probe else [], probe=about))
    tasks = Tasks(model)
    answers = {"prepare": tasks.prepare, "finish": tasks.finish, "drop": tasks.drop}
    threading.Thread(target=side_channel.serve, args=(answers,), daemon=True).start()
    if not hasattr(model, "stream"):
        channel.serve({"forward": tasks.forward})
    streams = Streams(model, channel, tasks.held)
    threading.Thread(target=channel.serve, args=({"stream": streams.start, "cancel": streams.cancel},), daemon=True).start()
    streams.loop.run_forever()


if __name__ == "__main__":
    main()
