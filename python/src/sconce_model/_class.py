"""Finds the class that the settings name, checks it and its options, loads it, and checks what it returns."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import ModuleType
from typing import Any

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
_MEDIA_TYPE = re.compile(r"[^*/\s]+/(\*|[^*/\s]+)|\*/\*")
_LARGEST = 2**53
_SIZES = f"it has 1 to {_LARGEST} tokens, and 0 to {_LARGEST} bytes"
_GENERIC = {list, typing.Final, typing.Union, getattr(types, "UnionType", typing.Union)}
CONCURRENCY = 16
"""How many tasks `stream` runs at once, unless the class has an option `concurrency`, or the settings say another number."""


def find(place: str, name: str) -> type[Model]:
    """The class of this name in a module, or in a file, which has a `/` in its name; checked.
    Raises `ClassProblem` if there is none, or if something is wrong with it; and whatever its module raises."""
    module = _file(Path(place)) if "/" in place else _module(place)
    if not hasattr(module, name):
        own = [it for it, value in vars(module).items() if _is_model(value)]
        raise ClassProblem(f"{place} has no {name}; its models: {', '.join(own) or 'none'}")
    return checked(getattr(module, name))


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise  # another module, which this one imports
        where = f"not on the path of {sys.executable}: {', '.join(sys.path)}"
        raise ClassProblem(f"there is no module {name}: {error.name} is {where}") from None


def _file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ClassProblem(f"there is no file {file}, whose name must end with .py")
    if file.stem in sys.modules:
        raise ClassProblem(f"{file} has the name of the module {file.stem}: give it another one")
    # As `python FILE` does, so that the file can import its neighbours, and other processes of the class the file.
    sys.path.insert(0, str(file.parent))
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _is_model(value: Any) -> bool:
    value = getattr(value, "sconce_model", value)
    return isinstance(value, type) and issubclass(value, Model) and value is not Model


def checked(given: Any) -> type[Model]:
    """The class itself, or that of a function with `one_pass`.
    Raises `ClassProblem`, which names the attribute that is wrong and says what it must be."""
    model: type[Model] = getattr(given, "sconce_model", given)
    if not _is_model(model):
        raise ClassProblem(f"{given!r} is no subclass of sconce_model.Model, and no function with @one_pass")
    name, known, wrong = model.__name__, [*METHODS, "urls", "media_types", "Options", "worker"], []
    for own in sorted({it for one in model.__mro__ if one is not Model and issubclass(one, Model) for it in vars(one)} - {*known}):
        if not own.startswith("_") and (close := difflib.get_close_matches(own, known, 1, 0.8)):
            wrong.append(f"{name}.{own} is unknown: did you mean {close[0]}? Begin names of your own with _")
    wrong += [problem for method in METHODS if hasattr(model, method) and (problem := _method_problem(model, method))]
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        wrong.append(f"{name}.__init__ must need no arguments, as options are given to load: {error}")
    _raise_all(wrong)
    served = routes(model)
    kinds = [kind for kind in ("forward", "stream") if hasattr(model, kind)]
    if len(kinds) != 1:
        has = "both" if kinds else "neither"
        raise ClassProblem(f"{name} must have either forward(self, batch) or stream(self, task); it has {has}")
    if kinds == ["stream"] and model.preprocess is not Model.preprocess:
        raise ClassProblem(f"{name} has stream, and so no preprocess: read the task in stream")
    if kinds == ["forward"] and model.finish is Model.finish and (other := [url for url in served if url not in URLS]):
        only = f"only {' and '.join(URLS)} have replies by default"
        raise ClassProblem(f"{name} answers {other[0]}, and so needs finish(self, task, outputs): {only}")
    return model


def _raise_all(problems: list[str]) -> None:
    """Raises one `ClassProblem` for all of them, if there are any: who mends one need not start again to learn the next."""
    if problems:
        raise ClassProblem("; ".join(problems))


def _method_problem(model: type[Model], name: str) -> str | None:
    method, place = inspect.getattr_static(model, name), f"{model.__name__}.{name}"
    wanted = f"{name}({', '.join(('self', *METHODS[name]))})"
    if not inspect.isfunction(method):
        return f"{place} must be a method: {wanted}"
    try:
        inspect.signature(method).bind(None, *METHODS[name])
    except TypeError as error:
        return f"{place}{inspect.signature(method)} must be {wanted}: {error}"
    if name == "stream" and not inspect.isasyncgenfunction(method):
        return f"{place} must be `async def`, with `yield`"
    if name != "stream" and (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)):
        return f"{place} must be `def`, not `async def`; only stream is asynchronous"
    return None


def routes(model: type[Model]) -> dict[str, list[str]]:
    """The media types of each URL. Raises `ClassProblem`."""
    urls, types, name = model.urls, model.media_types, model.__name__
    if isinstance(urls, str) or not urls or not all(isinstance(url, str) and url.startswith("/") for url in urls):
        raise ClassProblem(f'{name}.urls is {urls!r}; it must be a list of paths, such as ["/v1/embeddings"]')
    found = {url: types.get(url, (JSON,)) if isinstance(types, Mapping) else types for url in urls}
    if isinstance(types, Mapping) and (unknown := [url for url in types if url not in found]):
        raise ClassProblem(f"{name}.media_types has {unknown[0]!r}, which is not in {name}.urls")
    for these in found.values():
        if isinstance(these, str) or not these or not all(isinstance(it, str) and _MEDIA_TYPE.fullmatch(it) for it in these):
            raise ClassProblem(f'{name}.media_types has {these!r}; it must be a list such as ["image/jpeg", "image/*"], or ["*/*"]')
    return {url: [it.lower() for it in these] for url, these in found.items()}


def usual(model: type[Model]) -> tuple[str, str]:
    """The URL and the content type of a task that names none."""
    url, types = next(iter(routes(model).items()))
    return url, JSON if types[0] == "*/*" else types[0]


def options_of(model: type[Model]) -> dict[str, tuple[Any, Any]]:
    """The type and the default of each option; the default is `...` if the option must be set.
    Raises `ClassProblem` for a type or a default that is wrong."""
    holder = model.Options
    own = {name: value for one in reversed(holder.__mro__[:-1]) for name, value in vars(one).items() if name[0] != "_"}
    try:
        wanted = {**{name: type(value) for name, value in own.items()}, **typing.get_type_hints(holder)}
    except Exception as error:  # noqa: BLE001 - a name that is none, syntax of a later Python
        raise ClassProblem(f"the types of {holder.__qualname__} cannot be read: {error}") from None
    for name, value in own.items():
        if not _is(value, wanted[name]):
            raise ClassProblem(f"{holder.__qualname__}.{name} is {value!r} by default; its type is {type_name(wanted[name])}")
    for name, one in wanted.items():
        _check_type(f"{holder.__qualname__}.{name}", one)
    if hasattr(model, "stream"):
        wanted, own = {"concurrency": int, **wanted}, {"concurrency": CONCURRENCY, **own}
    return {name: (one, own.get(name, ...)) for name, one in wanted.items()}


def options_from(model: type[Model], given: Mapping[str, Any]) -> Any:
    """The options for `load`: an instance of the class's own `Options`.
    Raises `ClassProblem` for a value that is of another type, a name that is no option, or one that must be set."""
    known, holder, wrong = options_of(model), object.__new__(model.Options), []
    for name, value in given.items():
        if name not in known:
            wrong.append(f"options.{name} is no option of {model.__name__}; it has {', '.join(known) or 'none'}")
        elif not _is(value, known[name][0]):
            wrong.append(f"options.{name} is {value!r}; it must be of the type {type_name(known[name][0])}")
    for name, (wanted, default) in known.items():
        if name not in given and default is ...:
            wrong.append(f"options.{name} is not set; {model.__name__} needs it, of the type {type_name(wanted)}")
    _raise_all(wrong)
    for name, (wanted, default) in known.items():
        value = given.get(name, default)
        # As a number of Python's own, for whom it is one: a tensor of an int would be of ints.
        setattr(holder, name, float(value) if wanted is float else value)
    if hasattr(model, "stream") and not 1 <= holder.concurrency <= 1024:  # type: ignore[attr-defined]
        raise ClassProblem("options.concurrency must be from 1 to 1024")
    return holder


def type_name(wanted: Any) -> str:
    """As it is written in Python."""
    return wanted.__name__ if isinstance(wanted, type) and not typing.get_args(wanted) else str(wanted).replace("typing.", "")


def _is(value: Any, wanted: Any) -> bool:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is typing.Literal:
        return any(type(value) is type(it) and value == it for it in arguments)
    if origin is list:
        return isinstance(value, list) and all(_is(item, arguments[0]) for item in value)
    if arguments:  # a union
        return any(_is(value, one) for one in arguments)
    if wanted is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is wanted


def _check_type(place: str, wanted: Any) -> None:
    """Raises `ClassProblem` for the type of an option whose values could not be checked."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is None or origin is typing.Literal:
        return
    if origin not in _GENERIC:
        allowed = "str, int, float, bool, list, dict, list[…], Literal and Optional"
        raise ClassProblem(f"the type of {place} is {type_name(wanted)}; options have the types {allowed}")
    for one in arguments:
        _check_type(place, one)


def load(
    kind: Any,
    device: str = "cpu",
    dtype: str = "float32",
    options: Mapping[str, Any] | None = None,
    worker: Worker | None = None,
) -> Model:
    """Checks a class, or a function with `one_pass`, and loads the model in this process.
    Raises `ClassProblem` for a wrong class or wrong options, and whatever `load` raises."""
    kind = checked(kind)
    given = options_from(kind, options or {})
    model: Model = kind()
    model.worker = worker or Worker()
    model.load(device, dtype, given)
    return model


def probe_of(model: Model) -> Task | None:
    """The class's own, as a task for the first of its URLs."""
    if not hasattr(model, "probe") or (given := model.probe()) is None:
        return None
    return given if isinstance(given, Task) else Task.of(given, *usual(type(model)))


def prepared(model: Model, task: Task) -> list[Input]:
    """The inputs of a task, which then knows how many tokens they have.
    Raises whatever `preprocess` raises; `TaskError` if they are too many."""
    inputs = model.preprocess(task)
    if len(inputs) > model.worker.max_inputs:
        raise TaskError(413, f"the task has {len(inputs)} inputs; this pool takes {model.worker.max_inputs}")
    for one in inputs:
        if not isinstance(one, Input):
            raise TypeError(f"preprocess returned a list with {type(one).__name__}; it must be a list of Input")
        one.tokens, one.bytes = int(one.tokens), int(_size(one.value) if one.bytes is None else one.bytes)
        if not 1 <= one.tokens <= _LARGEST or not 0 <= one.bytes <= _LARGEST:
            raise ValueError(f"preprocess returned an Input of {one.tokens} tokens and {one.bytes} bytes; {_SIZES}")
    task.tokens = sum(one.tokens for one in inputs)
    return inputs


def _size(value: Any) -> int:
    """Bytes of memory, as far as they are easily told."""
    if isinstance(size := getattr(value, "nbytes", None), int):  # arrays and tensors
        return size
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    # Items are taken to be alike, as ids and pixels are.
    return len(value) * (8 + _size(value[0])) if isinstance(value, (list, tuple)) and value else 8


def computed(model: Model, batch: list[Input]) -> Any:
    """The outputs of a batch, as `forward` returned them: one for each input. Raises whatever `forward` raises."""
    outputs = model.forward(batch)
    if not hasattr(outputs, "__len__") or isinstance(outputs, (str, bytes, Mapping, AbstractSet)):
        raise TypeError(f"forward returned {type(outputs).__name__}; it must be a list, an array or a tensor")
    if len(outputs) != len(batch):
        raise ValueError(f"forward returned {len(outputs)} outputs for {len(batch)} inputs")
    return outputs


def finished(model: Model, task: Task, outputs: list[Any]) -> Body:
    """The body of the reply."""
    return Body.of(model.finish(task, outputs))
