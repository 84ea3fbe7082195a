"""What the author of a class uses: the base class, tasks, inputs, and bodies of replies. Nothing here runs a model."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Callable, ClassVar, TypeVar

from . import _bodies
from ._errors import TaskError

JSON = "application/json"

Output = Any
"""The result of one input: a vector, a number, or whatever the class's own `finish` takes. A `TaskError` in its place refuses
the input."""


@dataclass
class Input:
    """One item of a batch."""

    value: Any
    """What `forward` computes from."""
    tokens: int = 1
    """Its size. `batch.max_tokens` bounds the sum over a batch."""
    bytes: int | None = None
    """The memory that it takes. By default this is estimated from `value`: a text, bytes, an array, a tensor, or a list or dict
    of these."""


@dataclass(frozen=True)
class Body:
    """The body of a reply, or of a part of one, with its media type."""

    data: bytes
    content_type: str

    def __post_init__(self) -> None:
        if not isinstance(self.content_type, str):
            raise TypeError(f"the content type of a Body is {self.content_type!r}; it must be a str")
        if not isinstance(self.data, bytes):  # such as an array, whose length is not its number of bytes
            object.__setattr__(self, "data", memoryview(self.data).tobytes())

    def fields(self) -> dict[str, Any]:
        """As fields of a frame."""
        return {"content_type": self.content_type, "buffers": [self.data]}

    @staticmethod
    def of(value: Any) -> Body:
        """A `Body` stays as it is, a `str` is plain text, and anything else is JSON, with arrays and tensors as lists."""
        if isinstance(value, Body):
            return value
        if isinstance(value, str):
            return Body(value.encode(), "text/plain; charset=utf-8")
        data = json.dumps(value, allow_nan=False, ensure_ascii=False, default=lambda it: it.tolist())
        return Body(data.encode(), JSON)  # raises for half a surrogate pair, which UTF-8 cannot encode


@dataclass
class Task:
    """One message of a requester."""

    body: bytes
    url: str
    content_type: str = JSON
    headers: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0
    """The sum of the sizes of its inputs. Set after `preprocess`."""
    state: Any = None
    """For the class's own use: what `preprocess` stores here, `finish` reads."""

    @classmethod
    def of(cls, body: Any, url: str, content_type: str = JSON) -> Task:
        """A task whose body is these bytes, or anything else as JSON."""
        return cls(body if isinstance(body, bytes) else json.dumps(body).encode(), url, content_type)

    @property
    def media_type(self) -> str:
        """The content type without its parameters, in lower case."""
        return self.content_type.partition(";")[0].strip().lower()

    def json(self) -> Any:
        """The body as JSON. Raises `TaskError` if the body is not JSON."""
        try:
            return self._json
        except (ValueError, RecursionError) as error:
            raise TaskError(400, f"the body is not JSON: {error}") from None

    @cached_property
    def _json(self) -> Any:
        # Given bytes, `loads` would guess the encoding, and accept half a surrogate pair.
        found = json.loads(self.body.decode("utf-8-sig"), parse_constant=_refuse_constant)
        if b"\\u" in self.body:
            json.dumps(found, ensure_ascii=False).encode()  # raises for half a surrogate pair, which UTF-8 cannot encode
        return found

    def field(self, name: str, default: Any = ...) -> Any:
        """One field of a body that is a JSON object. A field that is `null` counts as missing.
        Raises `TaskError` if the body is no object, or if the field is missing and there is no default."""
        body = self.json()
        if not isinstance(body, dict):
            raise TaskError(400, "the body must be a JSON object")
        if (value := body.get(name)) is not None:
            return value
        if default is ...:
            raise TaskError(400, f"the field {name!r} is missing", name)
        return default


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


@dataclass(frozen=True)
class Worker:
    """The worker for which a model runs, in a process that serves this worker alone."""

    slot: str = "test/cpu-0"
    """The worker's name, such as `embed/0`, in logs and in `sconce ctl stats`."""
    slot_index: int = 0
    seed: int = 0
    """A number of 32 bits for `torch.manual_seed` or `numpy.random.seed`. Each slot has another one, which stays the same when
    the worker is restarted."""
    threads: int = 1
    device_name: str = "cpu"
    """`cpu`, or the UUID of the GPU. The process sees this GPU only, as `cuda:0`."""
    model_name: str = "model"
    served_names: Sequence[str] = ()
    max_inputs: int = 2048
    """The most inputs of a task. A task with more is refused."""


class Model:
    """A model. Subclass it, set `urls`, and write `load`, and `forward` or `stream`."""

    urls: ClassVar[Sequence[str]] = ()
    """The URLs that it answers, such as `("/v1/embeddings",)`. A task without a `url` is for the first."""
    media_types: ClassVar[Sequence[str] | Mapping[str, Sequence[str]]] = (JSON,)
    """The media types of the bodies that it takes, or a dict that has them for each URL. `image/*` stands for all images."""
    worker: Worker = Worker()
    """Set before `load`."""

    class Options:
        """The settings `[pool.options]`: annotated names, with defaults. One without a default must be set."""

    def load(self, device: str, dtype: str, options: Any) -> None:
        """Loads the model onto `device`, which is "cpu" or "cuda:0". `dtype` has PyTorch's name: "float32", "bfloat16",
        "float16" or "int8". `options` is an instance of `Options`. Runs once, on the main thread, before any task."""

    def preprocess(self, task: Task) -> list[Input]:
        """The inputs of a task. By default these are the texts of the field `input`, or for `/v1/score` the pairs of `text_1` and
        `text_2`, with a quarter of their letters as tokens. Runs on a thread of its own, beside `forward`."""

        def tokens(value: Any) -> int:
            letters = len(value) if isinstance(value, str) else sum(map(len, value))
            return math.ceil(letters / 4) or 1

        return [Input(value, tokens(value)) for value in _bodies.texts_or_pairs(task, self.worker)]

    if TYPE_CHECKING:

        def forward(self, batch: list[Input]) -> Any:
            """The outputs of a batch, in the order of its inputs: a list, an array or a tensor. Each item is an `Output`. Runs on
            the main thread."""

        def stream(self, task: Task) -> AsyncIterator[Any]:
            """Takes the place of `forward`: an `async def` that yields the parts of a reply. Several tasks run at once, on one
            event loop. A cancelled task gets `asyncio.CancelledError` at its next `await` or `yield`."""

        def probe(self) -> Any:
            """A small body that the model can certainly answer: a dict, bytes or a `Task`. It is computed before the worker takes
            tasks, and again when an input has failed."""

    def finish(self, task: Task, outputs: list[Any]) -> Any:
        """The body of the reply, made from the outputs, or from the parts of a stream: a dict or list for JSON, a `str` for plain
        text, or a `Body` of any media type. By default vectors become a reply of `/v1/embeddings`, numbers one of `/v1/score`, and
        the parts of a stream, which must be texts, are joined. Runs on the thread of `preprocess`; for a stream, on the main
        thread."""
        if hasattr(self, "stream"):
            if not all(isinstance(part, str) for part in outputs):
                raise TypeError(f"{type(self).__name__} yields parts that are no texts, and so needs finish(self, task, outputs)")
            return "".join(outputs)
        return Body(_bodies.reply(task, outputs, self.worker), JSON)


F = TypeVar("F", bound=Callable[..., Any])


def one_pass(url: str, **attributes: Any) -> Callable[[F], F]:
    """Decorates a function so that it can be a pool's model. For `/v1/embeddings` the function takes a list of texts and returns
    a vector for each; for `/v1/score` it takes a list of pairs of texts and returns a number for each. It can still be called
    as before. Its module must load what it needs when it is imported. `attributes` are those of a `Model`, such as `probe`."""

    def decorated(function: F) -> F:
        def forward(self: Model, batch: list[Input]) -> Any:
            return function([it.value for it in batch])

        own = {"urls": (url,), "forward": forward, "__module__": function.__module__, **attributes}
        function.sconce_model = type(function.__name__, (Model,), own)  # type: ignore[attr-defined]
        return function

    return decorated
