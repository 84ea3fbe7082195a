"""Finds the class that the settings name, checks it and its options, loads it, and checks what its methods return."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ._bodies import URLS
from ._errors import ClassProblem, TaskError
from ._model import JSON, Body, Input, Model, Task, Worker

METHODS = {
    "load": ("device", "dtype", "options"),
    "preprocess": ("task",),
    "forward": ("batch",),
    "stream": ("task",),
    "finish": ("task", "outputs"),
    "probe": (),
}
"""The parameters of each method that a class may have, after `self`."""
_ATTRIBUTES = [*METHODS, "urls", "media_types", "Options", "worker"]
_MEDIA_TYPE = re.compile(r"[^*/\s]+/(\*|[^*/\s]+)|\*/\*")
_MAX_SIZE = 2**53
"""The largest integer that every reader of JSON keeps exactly."""
_UNIONS = {typing.Final, typing.Union, getattr(types, "UnionType", typing.Union)}  # Final has one argument
CONCURRENCY = 16
"""The default of `options.concurrency`, the number of tasks that `stream` runs at once."""


def find_class(place: str, name: str) -> type[Model]:
    """The class of this name in a module, or in a file if `place` has a `/`; checked.
    Raises `ClassProblem` if there is none or something is wrong with it, and whatever the module raises."""
    module = _import(_module_of_file(Path(place)) if "/" in place else place)
    if not hasattr(module, name):
        models = [it for it, value in vars(module).items() if _is_model(value)]
        raise ClassProblem(f"{place} has no {name}; its models: {', '.join(models) or 'none'}")
    return check_class(getattr(module, name))


def _module_of_file(file: Path) -> str:
    """The name by which the file is imported, by this process and by those that the class starts."""
    if not file.is_file() or file.suffix != ".py":
        raise ClassProblem(f"there is no file {file}, whose name must end with .py")
    if file.stem in sys.modules:
        raise ClassProblem(f"{file} has the name of the module {file.stem}: give it another one")
    sys.path.insert(0, str(file.parent))  # as `python FILE` does
    return file.stem


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise  # The missing module is another one, which this module imports.
        where = f"not on the path of {sys.executable}: {', '.join(sys.path)}"
        raise ClassProblem(f"there is no module {name}: {error.name} is {where}") from None


def _is_model(value: Any) -> bool:
    value = getattr(value, "sconce_model", value)
    return isinstance(value, type) and issubclass(value, Model) and value is not Model


def check_class(given: Any) -> type[Model]:
    """The class itself, or that of a function with `one_pass`.
    Raises `ClassProblem`, which names the attribute that is wrong and says what it must be."""
    model: type[Model] = getattr(given, "sconce_model", given)
    if not _is_model(model):
        raise ClassProblem(f"{given!r} is no subclass of sconce_model.Model, and no function with @one_pass")
    _raise_all(_attribute_problems(model))
    name, urls = model.__name__, routes(model)
    work = [method for method in ("forward", "stream") if hasattr(model, method)]
    if len(work) != 1:
        has = "both" if work else "neither"
        raise ClassProblem(f"{name} must have either forward(self, batch) or stream(self, task); it has {has}")
    if work == ["stream"] and model.preprocess is not Model.preprocess:
        raise ClassProblem(f"{name} has stream, and so no preprocess: read the task in stream")
    if work == ["forward"] and model.finish is Model.finish and (other := [url for url in urls if url not in URLS]):
        only = f"only {' and '.join(URLS)} have replies by default"
        raise ClassProblem(f"{name} answers {other[0]}, and so needs finish(self, task, outputs): {only}")
    return model


def _raise_all(problems: Iterable[str]) -> None:
    """Raises one `ClassProblem` with all problems, if there are any, so that one start is enough to learn them."""
    if message := "; ".join(problems):
        raise ClassProblem(message)


def _attribute_problems(model: type[Model]) -> Iterator[str]:
    """What is wrong with names and signatures."""
    own = {it for one in model.__mro__ if one is not Model and issubclass(one, Model) for it in vars(one)}
    for name in sorted(own.difference(_ATTRIBUTES)):
        if not name.startswith("_") and (close := difflib.get_close_matches(name, _ATTRIBUTES, 1, 0.8)):
            yield f"{model.__name__}.{name} is unknown: did you mean {close[0]}? Begin names of your own with _"
    for name in METHODS:
        if hasattr(model, name):
            yield from _method_problems(model, name)
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        yield f"{model.__name__}.__init__ must need no arguments, as options are given to load: {error}"


def _method_problems(model: type[Model], name: str) -> Iterator[str]:
    method, place = inspect.getattr_static(model, name), f"{model.__name__}.{name}"
    expected = f"{name}({', '.join(('self', *METHODS[name]))})"
    if not inspect.isfunction(method):
        yield f"{place} must be a method: {expected}"
        return
    try:
        inspect.signature(method).bind(None, *METHODS[name])
    except TypeError as error:
        yield f"{place}{inspect.signature(method)} must be {expected}: {error}"
    if name == "stream" and not inspect.isasyncgenfunction(method):
        yield f"{place} must be `async def`, with `yield`"
    if name != "stream" and (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)):
        yield f"{place} must be `def`, not `async def`; only stream is asynchronous"


def routes(model: type[Model]) -> dict[str, list[str]]:
    """The media types of each URL. Raises `ClassProblem`."""
    name, urls, media_types = model.__name__, model.urls, model.media_types
    if isinstance(urls, str) or not urls or not all(isinstance(url, str) and url.startswith("/") for url in urls):
        raise ClassProblem(f'{name}.urls is {urls!r}; it must be a list of paths, such as ["/v1/embeddings"]')
    found = {url: media_types.get(url, (JSON,)) if isinstance(media_types, Mapping) else media_types for url in urls}
    if isinstance(media_types, Mapping) and (unknown := [url for url in media_types if url not in found]):
        raise ClassProblem(f"{name}.media_types has {unknown[0]!r}, which is not in {name}.urls")
    for these in found.values():
        if isinstance(these, str) or not these or not all(isinstance(it, str) and _MEDIA_TYPE.fullmatch(it) for it in these):
            raise ClassProblem(f'{name}.media_types has {these!r}; it must be a list such as ["image/jpeg", "image/*"], or ["*/*"]')
    return {url: [it.lower() for it in these] for url, these in found.items()}


def gives_numbers(model: type[Model]) -> bool:
    """Whether `forward` gives numbers, from which the worker writes the replies itself."""
    return hasattr(model, "forward") and model.finish is Model.finish


class Option(NamedTuple):
    """An option of a class."""

    type: Any
    default: Any
    """`...` if the option must be set."""


def options_of(model: type[Model]) -> dict[str, Option]:
    """The options that a class has. Raises `ClassProblem` for a type or a default that is wrong."""
    holder = model.Options
    defaults = {name: value for one in reversed(holder.__mro__[:-1]) for name, value in vars(one).items() if name[0] != "_"}
    try:
        hints = {**{name: type(value) for name, value in defaults.items()}, **typing.get_type_hints(holder)}
    except Exception as error:  # noqa: BLE001 - an unknown name, or the syntax of a later Python
        raise ClassProblem(f"the types of {holder.__qualname__} cannot be read: {error}") from None
    for name, wanted in hints.items():
        place, default = f"{holder.__qualname__}.{name}", defaults.get(name)
        if not _has_type(default, wanted, place) and name in defaults:
            raise ClassProblem(f"{place} is {default!r} by default; its type is {type_name(wanted)}")
    if hasattr(model, "stream"):
        hints, defaults = {"concurrency": int, **hints}, {"concurrency": CONCURRENCY, **defaults}
    return {name: Option(wanted, defaults.get(name, ...)) for name, wanted in hints.items()}


def options_from(model: type[Model], given: Mapping[str, Any]) -> Any:
    """The argument `options` of `load`: an instance of the class's own `Options`.
    Raises `ClassProblem` for an unknown option, for a value of another type, and for a missing one."""
    known, options, problems = options_of(model), object.__new__(model.Options), []
    for name in [name for name in given if name not in known]:
        problems.append(f"options.{name} is no option of {model.__name__}; it has {', '.join(known) or 'none'}")
    for name, option in known.items():
        value = given.get(name, option.default)
        if value is ...:
            problems.append(f"options.{name} is not set; {model.__name__} needs it, of the type {type_name(option.type)}")
        elif not _has_type(value, option.type, f"options.{name}"):
            problems.append(f"options.{name} is {value!r}; it must be of the type {type_name(option.type)}")
        else:
            # An integer is accepted for a float, but PyTorch would make a tensor of integers from it.
            setattr(options, name, float(value) if option.type is float else value)
    _raise_all(problems)
    if hasattr(model, "stream") and not 1 <= options.concurrency <= 1024:  # type: ignore[attr-defined]
        raise ClassProblem("options.concurrency must be from 1 to 1024")
    return options


def type_name(wanted: Any) -> str:
    """A type as it is written in Python."""
    return wanted.__name__ if isinstance(wanted, type) and not typing.get_args(wanted) else str(wanted).replace("typing.", "")


def _has_type(value: Any, wanted: Any, place: str) -> bool:
    """Whether the value of the option `place` has this type. Raises `ClassProblem` for a type that cannot be checked."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is float:
        return type(value) in (int, float) and math.isfinite(value)
    if origin is None:
        return type(value) is wanted
    if origin is typing.Literal:
        return any(type(value) is type(it) and value == it for it in arguments)
    if origin is list:
        return isinstance(value, list) and all(_has_type(item, arguments[0], place) for item in value)
    if origin in _UNIONS:
        return any(_has_type(value, one, place) for one in arguments)
    allowed = "str, int, float, bool, list, dict, list[…], Literal and Optional"
    raise ClassProblem(f"the type of {place} is {type_name(wanted)}; options have the types {allowed}")


def load(
    kind: Any,
    device: str = "cpu",
    dtype: str = "float32",
    options: Mapping[str, Any] | None = None,
    worker: Worker | None = None,
) -> Model:
    """Checks a class, or a function with `one_pass`, and loads the model in this process.
    Raises `ClassProblem` for a wrong class or wrong options, and whatever `load` raises."""
    kind = check_class(kind)
    given = options_from(kind, options or {})
    model: Model = kind()
    model.worker = worker or Worker()
    model.load(device, dtype, given)
    return model


def task_of(model: Model, given: Any) -> Task:
    """`given` if it is a task; otherwise a task with this body for the first of the class's URLs."""
    if isinstance(given, Task):
        return given
    url, types = next(iter(routes(type(model)).items()))
    return Task.of(given, url, JSON if types[0] == "*/*" else types[0])


def probe_of(model: Model) -> Task | None:
    """The class's own probe; None if it has none."""
    given = model.probe() if hasattr(model, "probe") else None
    return None if given is None else task_of(model, given)


def call_preprocess(model: Model, task: Task) -> list[Input]:
    """The inputs of a task, whose `tokens` are then set.
    Raises whatever `preprocess` raises; `TaskError` if there are too many inputs."""
    inputs = model.preprocess(task)
    if len(inputs) > model.worker.max_inputs:
        raise TaskError(413, f"the task has {len(inputs)} inputs; this pool takes {model.worker.max_inputs}")
    for one in inputs:
        if not isinstance(one, Input):
            raise TypeError(f"preprocess returned a list with {type(one).__name__}; it must be a list of Input")
        one.tokens, one.bytes = int(one.tokens), int(_bytes_of(one.value) if one.bytes is None else one.bytes)
        if not 1 <= one.tokens <= _MAX_SIZE or not 0 <= one.bytes <= _MAX_SIZE:
            bounds = f"it has 1 to {_MAX_SIZE} tokens, and 0 to {_MAX_SIZE} bytes"
            raise ValueError(f"preprocess returned an Input of {one.tokens} tokens and {one.bytes} bytes; {bounds}")
    task.tokens = sum(one.tokens for one in inputs)
    return inputs


def _bytes_of(value: Any) -> int:
    """An estimate of the memory that a value takes."""
    if isinstance(size := getattr(value, "nbytes", None), int):  # arrays and tensors
        return size
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    # All items are taken to be as large as the first, as token ids and pixels are, since looking at each would take long.
    return len(value) * (8 + _bytes_of(value[0])) if isinstance(value, (list, tuple)) and value else 8


def call_forward(model: Model, batch: list[Input]) -> Any:
    """The outputs of a batch, as `forward` returns them: one for each input. Raises whatever `forward` raises."""
    outputs = model.forward(batch)
    if not hasattr(outputs, "__len__") or isinstance(outputs, (str, bytes, Mapping, AbstractSet)):
        raise TypeError(f"forward returned {type(outputs).__name__}; it must be a list, an array or a tensor")
    if len(outputs) != len(batch):
        raise ValueError(f"forward returned {len(outputs)} outputs for {len(batch)} inputs")
    return outputs


def call_finish(model: Model, task: Task, outputs: list[Any]) -> Body:
    """The body of the reply. Raises whatever `finish` raises."""
    return Body.of(model.finish(task, outputs))
