"""What a model is written with: its base class, tasks, inputs, bodies of replies, and the error that refuses a task. Nothing
here runs a model."""

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
"""The result of one input: a vector, a number, or whatever the class's own `finish` takes. A `TaskError` refuses the input."""


@dataclass
class Input:
    """One row of a batch."""

    value: Any
    """What `forward` needs of it."""
    tokens: int = 1
    """Its size. `batch.max_tokens` bounds the sum over a batch."""
    bytes: int | None = None
    """The memory that it holds. By default that of `value`, as far as it is a text, bytes, an array or a tensor."""


@dataclass(frozen=True)
class Body:
    """The body of a reply, or of a part of one, with its media type."""

    data: bytes
    content_type: str

    def __post_init__(self) -> None:
        if not isinstance(self.content_type, str):
            raise TypeError(f"the content type of a Body is {self.content_type!r}; it must be a str")
        if not isinstance(self.data, bytes):  # an array's length is not its number of bytes
            object.__setattr__(self, "data", memoryview(self.data).tobytes())

    def fields(self) -> dict[str, Any]:
        return {"content_type": self.content_type, "buffers": [self.data]}

    @staticmethod
    def of(value: Any) -> Body:
        """A `Body` is itself, a `str` is plain text, and anything else is JSON, arrays and tensors as lists."""
        if isinstance(value, Body):
            return value
        if isinstance(value, str):
            return Body(value.encode(), "text/plain; charset=utf-8")
        data = json.dumps(value, allow_nan=False, ensure_ascii=False, default=lambda it: it.tolist())
        return Body(data.encode(), JSON)  # half a surrogate pair is no text, and raises here


@dataclass
class Task:
    """One message of a requester."""

    body: bytes
    url: str
    content_type: str = JSON
    headers: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0
    """The sizes of all its inputs, once they are made."""
    state: Any = None
    """For the class's own use, between `preprocess` and `finish`."""

    @classmethod
    def of(cls, body: Any, url: str, content_type: str = JSON) -> Task:
        """A task with bytes as its body, or with anything else as JSON."""
        return cls(body if isinstance(body, bytes) else json.dumps(body).encode(), url, content_type)

    @property
    def media_type(self) -> str:
        """The content type without its parameters, in small letters."""
        return self.content_type.partition(";")[0].strip().lower()

    def json(self) -> Any:
        """The body as JSON. Raises `TaskError` if it is none."""
        try:
            return self._json
        except (ValueError, RecursionError) as error:
            raise TaskError(400, f"the body is not JSON: {error}") from None

    @cached_property
    def _json(self) -> Any:
        # From bytes, `loads` would guess an encoding, and take half a surrogate pair for a character.
        found = json.loads(self.body.decode("utf-8-sig"), parse_constant=_no_number)
        if b"\\u" in self.body:
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is no text, and cannot be encoded
        return found

    def field(self, name: str, default: Any = ...) -> Any:
        """One field of a body that is a JSON object; `null` is as none.
        Raises `TaskError` if the body is no object, or has no such field and there is no default."""
        body = self.json()
        if not isinstance(body, dict):
            raise TaskError(400, "the body must be a JSON object")
        if (value := body.get(name)) is not None:
            return value
        if default is ...:
            raise TaskError(400, f"the field {name!r} is missing", name)
        return default


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


@dataclass(frozen=True)
class Worker:
    """Where a model runs: in one process, for one worker."""

    slot: str = "test/cpu-0"
    """Its name, in logs and in `sconce ctl stats`."""
    slot_index: int = 0
    seed: int = 0
    """32 bits, another one for each slot, and the same after each restart: for `torch.manual_seed` or `numpy.random.seed`."""
    threads: int = 1
    device_name: str = "cpu"
    """`cpu`, or the card's UUID. The model sees this card only, as `cuda:0`."""
    model_name: str = "model"
    served_names: Sequence[str] = ()
    max_inputs: int = 2048
    """Of a task; more are refused."""


class Model:
    """A model. Subclass it, set `urls`, and write `load`, and `forward` or `stream`."""

    urls: ClassVar[Sequence[str]] = ()
    """What it answers, such as `("/v1/embeddings",)`. A message without a `url` is for the first."""
    media_types: ClassVar[Sequence[str] | Mapping[str, Sequence[str]]] = (JSON,)
    """The media types of bodies, for all URLs, or a dict with those of each; `image/*` stands for all images."""
    worker: Worker = Worker()
    """Set before `load`."""

    class Options:
        """The settings `[pool.options]`: annotated names, with defaults. One without a default must be set."""

    def load(self, device: str, dtype: str, options: Any) -> None:
        """Loads the model, onto the device "cpu" or "cuda:0", and in `dtype`, as PyTorch calls it: "float32", "bfloat16",
        "float16", "int8". Runs once, on the main thread, before any task. `options` is an instance of `Options`."""

    def preprocess(self, task: Task) -> list[Input]:
        """The inputs of a task: by default a text, or the texts, of the field `input`; for `/v1/score` the pairs of `text_1`
        and `text_2`. Runs on a thread of its own, beside `forward`."""
        return [Input(value, tokens=math.ceil(length / 4) or 1) for value, length in _bodies.values(task, self.worker)]

    if TYPE_CHECKING:

        def forward(self, batch: list[Input]) -> Any:
            """The outputs of a batch, in the order of its inputs: a list, an array or a tensor, whose items are anything that
            `finish` takes, or a `TaskError`. Runs on the main thread."""

        def stream(self, task: Task) -> AsyncIterator[Any]:
            """In the place of `forward`: an `async def` that yields the parts of a reply. Several run at once, on one event
            loop; a cancelled task gets `asyncio.CancelledError` at the next `await` or `yield`."""

        def probe(self) -> Any:
            """A small body that the model can certainly answer, as a dict, as bytes or as a `Task`. It is computed before the
            worker takes work, and again when an input fails."""

    def finish(self, task: Task, outputs: list[Any]) -> Any:
        """The body of the reply, from the outputs, or from the parts of a stream: a dict or a list is JSON, a `str` plain text,
        and a `Body` has any media type. By default vectors are a reply of `/v1/embeddings`, and numbers of `/v1/score`; the
        parts of a stream, if they are all texts, are joined."""
        if hasattr(self, "stream"):
            if not all(isinstance(part, str) for part in outputs):
                raise TypeError(f"{type(self).__name__} yields parts that are no texts, and so needs finish(self, task, outputs)")
            return "".join(outputs)
        return Body(_bodies.filled(_bodies.template(task, len(outputs), self.worker), outputs), JSON)


F = TypeVar("F", bound=Callable[..., Any])


def one_pass(url: str, **attributes: Any) -> Callable[[F], F]:
    """Makes a model of a function from a list of texts to a list of vectors, for `/v1/embeddings`, or from a list of pairs of
    texts to a list of numbers, for `/v1/score`. The function itself stays as it is. What it needs is loaded by its module, when
    that is imported; `attributes` are those of the class, such as `probe`.
    """

    def decorated(function: F) -> F:
        def forward(self: Model, batch: list[Input]) -> Any:
            return function([it.value for it in batch])

        own = {"urls": (url,), "forward": forward, "__module__": function.__module__, **attributes}
        function.sconce_model = type(function.__name__, (Model,), own)  # type: ignore[attr-defined]
        return function

    return decorated
