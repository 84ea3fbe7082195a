"""The client for asyncio, over aio-pika."""

from __future__ import annotations

import asyncio
import io
import logging
import random
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Literal, TypeVar, overload

import aio_pika
import aiormq.connection
import pamqp.frame
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage, ConnectionParameter
from aio_pika.exceptions import AMQPError, DeliveryError, PublishError
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic
from pamqp.exceptions import PAMQPException
from pamqp.header import ContentHeader

from . import _broker, _frames, _task, _wire, errors
from ._reply import Classified, Entity, Label, Part, Ranked, Reply, Transcript
from ._task import Answer, Body, Call, Defaults, File, Messages, Prompt, Task, TaskOptions, Texts
from ._wire import Runs
from .errors import InputError, TaskError

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray
    from typing_extensions import Self, Unpack
    from yarl import URL

LOG = logging.getLogger("sconce_client")
LONGEST_DELAY = 30.0
LOST = (AMQPError, PAMQPException, OSError, RuntimeError)
"""What aio-pika raises when the connection or its channel is gone."""
HANG_UP_WITHIN = 5.0
T = TypeVar("T")


class AsyncClient(Defaults):
    """Publishes tasks and waits for their replies, in one event loop: `async with AsyncClient(url) as client`.

    After a lost connection it connects again and publishes what has no reply yet, so a task may be computed twice;
    second replies are dropped.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        queue: str = _task.QUEUE,
        timeout: float | None = 120.0,
        max_in_flight: int = 128,
        reply_queue: str | None = None,
        control_exchange: str | None = _task.CONTROL_EXCHANGE,
        connect_timeout: float = 15.0,
    ) -> None:
        """Does not connect yet: `connect` does, and `async with`.

        url: the broker's address, or several with commas; else `SCONCE_BROKER__URL` or `AMQP_URL` of the environment, else
            the local broker.
        queue: the pool's task queue, unless a call names another.
        timeout: seconds for each task, unless a call says otherwise; the broker drops the task after them too.
        max_in_flight: tasks without a reply. At so many, a call that publishes waits.
        reply_queue: a queue that you have declared for this client alone. It keeps replies over a lost connection, and
            only unconfirmed tasks are published again. Else: an exclusive queue.
        control_exchange: where to cancel tasks (`admin.control_exchange`), or None.
        """
        self._queue, self._timeout = queue, timeout
        self._link = _Link(_broker.urls(url), reply_queue, control_exchange, max_in_flight, connect_timeout)

    async def connect(self) -> None:
        """Connects, once. Raises ConnectionFailed."""
        await self._link.connect()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. What has no reply yet is cancelled, and fails with ClientClosed."""
        await self._link.close()

    @overload
    async def embed(
        self, texts: Iterable[str], *, errors: Literal["each"], rows_per_task: int = ..., **more: Any
    ) -> list[list[float] | InputError]: ...

    @overload
    async def embed(
        self, texts: Iterable[str], *, as_array: Literal[True], rows_per_task: int = ..., **more: Any
    ) -> NDArray[numpy.float32]: ...

    @overload
    async def embed(self, texts: Iterable[str], *, rows_per_task: int = ..., **more: Any) -> list[list[float]]: ...

    async def embed(
        self, texts: Iterable[str], *, as_array: bool = False, rows_per_task: int = _task.ROWS_PER_TASK, **more: Any
    ) -> Any:
        """One vector for each text, in order: lists of floats; with `as_array` the rows of a numpy array of float32.

        A text that is longer than the model takes is cut, and TextsTruncated is warned of; `truncate=False` has it
        refused. With `errors="each"` a text that is refused has an InputError in its place; else it fails the call.
        `more` are further fields of the body, such as `model`, `dimensions` and `prompt_name`. A time-out is for each
        task of `rows_per_task` texts, not for all of them.
        """
        packs = _task.text_packs(texts, rows_per_task)
        return await self._gather(_task.embed(self, packs, as_array, more))

    @overload
    async def embed_tokens(
        self, inputs: Iterable[Sequence[int]], *, errors: Literal["each"], rows_per_task: int = ..., **more: Any
    ) -> list[list[float] | InputError]: ...

    @overload
    async def embed_tokens(
        self, inputs: Iterable[Sequence[int]], *, as_array: Literal[True], rows_per_task: int = ..., **more: Any
    ) -> NDArray[numpy.float32]: ...

    @overload
    async def embed_tokens(
        self, inputs: Iterable[Sequence[int]], *, rows_per_task: int = ..., **more: Any
    ) -> list[list[float]]: ...

    async def embed_tokens(
        self,
        inputs: Iterable[Sequence[int]],
        *,
        as_array: bool = False,
        rows_per_task: int = _task.ROWS_PER_TASK,
        **more: Any,
    ) -> Any:
        """As `embed`, for lists of token ids of the model's own tokenizer."""
        packs = _task.token_packs(inputs, rows_per_task)
        return await self._gather(_task.embed(self, packs, as_array, more))

    async def embed_images(
        self, images: Iterable[File], *, as_array: bool = False, rows_per_task: int = 8, **more: Any
    ) -> Any:
        """One vector for each image, in order, by a model of texts and images: its vectors of texts, which `embed` gives,
        lie in the same space. The images are JPEG, PNG or WebP files: paths, bytes, or URLs from which a worker fetches
        them. The result and `more` are as for `embed`. With `errors="each"` a file that cannot be read, or is no image, has
        an InputError in its place, too.
        """
        packs = _task.image_packs(images, rows_per_task, _task.is_each(more))
        return await self._gather(_task.embed(self, packs, as_array, more))

    async def embed_sparse(
        self, texts: Iterable[str], *, rows_per_task: int = _task.ROWS_PER_TASK, **more: Any
    ) -> list[dict[int, float]]:
        """The sparse vector of each text, in order, by a SPLADE model: its numbers by the ids of tokens. All are above 0.

        `more` are further fields of the body: `top_k` and `threshold`, which leave out small numbers, `prompt_name`,
        `truncate` and `model`.
        """
        return await self._gather(_task.embed_sparse(self, texts, rows_per_task, more))

    async def rerank(
        self, query: str, documents: Iterable[str], *, top_n: int | None = None, **more: Any
    ) -> list[Ranked]:
        """The documents by how well they answer the query, best first. Scores are between 0 and 1.

        All documents are one task: at most `pool.max_inputs` of them. `instruction` says what makes a document relevant, for
        models whose prompts have an instruction.
        """
        return await self._gather(_task.rerank(self, query, documents, {**more, "top_n": top_n}))

    async def score(self, text_1: Texts, text_2: Texts, **more: Any) -> list[float]:
        """A score for each pair: of one text with one or many, or of two lists of the same length."""
        return await self._gather(_task.score(self, text_1, text_2, more))

    @overload
    async def classify(
        self, texts: Iterable[str], *, labels: Sequence[str], rows_per_task: int = ..., **more: Any
    ) -> list[list[Label]]: ...

    @overload
    async def classify(self, texts: Iterable[str], *, rows_per_task: int = ..., **more: Any) -> list[Classified]: ...

    async def classify(
        self,
        texts: Iterable[str],
        *,
        labels: Sequence[str] | None = None,
        rows_per_task: int = _task.ROWS_PER_TASK,
        **more: Any,
    ) -> Any:
        """The best label of each text, in order, with the probabilities of all labels; with `top_k`, the best ones.

        With `labels`, which a model of natural language inference takes: a list of these labels for each text, likeliest
        first. Then `more` may have `hypothesis_template` and `multi_label`, and `rows_per_task` counts pairs of a text and
        a label.
        """
        if labels is not None:
            return await self._gather(_task.classify_by(self, texts, labels, rows_per_task, more))
        return await self._gather(_task.classify(self, texts, rows_per_task, more))

    async def token_labels(
        self, texts: Iterable[str], *, rows_per_task: int = _task.ROWS_PER_TASK, **more: Any
    ) -> list[list[Entity]]:
        """The names and other entities in each text, in order. `more` are the fields of such a request:
        `aggregation_strategy`, `ignore_labels`, and `stride`, with which long texts are read in windows."""
        return await self._gather(_task.token_labels(self, texts, rows_per_task, more))

    async def classify_image(
        self, image: File, content_type: str | None = None, *, top_k: int | None = None, **more: Any
    ) -> list[Label]:
        """What is on a picture, likeliest first. The image is a JPEG, PNG or WebP file: its path, its
        bytes, or a URL from which a worker fetches it. A model of texts and images takes `labels`, a list of texts."""
        return await self._gather(_task.classify_image(self, image, content_type, {**more, "top_k": top_k}))

    async def caption(self, image: File, content_type: str | None = None, **more: Any) -> str:
        """A text that describes an image, which is given as for `classify_image`. `more` are the fields of such a request:
        `prompt`, the beginning of the text, and `max_new_tokens`."""
        return await self._gather(_task.caption(self, image, content_type, more))

    async def generate_images(self, prompt: str, **more: Any) -> list[bytes]:
        """Images of a text, as the bytes of PNG files. `more` are the fields of such a request: `n`, `size` ("512x512"),
        `steps`, `seed`, `negative_prompt` and `guidance_scale`. For the progress there is `stream`."""
        return await self._gather(_task.generate_images(self, prompt, more))

    async def transcribe(
        self,
        sound: File,
        content_type: str | None = None,
        *,
        translate: bool = False,
        words: bool = False,
        **more: Any,
    ) -> Transcript:
        """What is said in a recording: a WAV, FLAC, MP3 or Ogg Vorbis file, as its path, its bytes, or a URL
        from which a worker fetches it.

        With `translate` the text is English. With `words` it says when each word was said. `more` are the fields of
        such a request, such as `language`.
        """
        return await self._gather(_task.transcribe(self, sound, content_type, translate, words, more))

    async def voices(self) -> list[str]:
        """The names of the voices that `speak` takes."""
        return await self._gather(_task.voices(self))

    async def speak(self, text: str, **more: Any) -> bytes:
        """The sound of a text, as the bytes of a WAV file. `more` are the fields of such a request, such as `voice`,
        `speed`, `seed`, and `response_format` ("wav", "pcm" or "flac"). With `phonemes` the text is not read.

        For each sentence as soon as it is spoken, there is `stream`.
        """
        return await self._gather(_task.speak(self, text, more))

    async def complete(self, prompt: Prompt, **more: Any) -> Reply:
        """Continues a text. `more` are OpenAI's fields, such as `max_tokens`. `.text` is the text."""
        return await self._link.call(_task.complete(self, prompt, more))

    async def chat(self, messages: Messages, **more: Any) -> Reply:
        """Answers a chat: one text, or messages. `more` are OpenAI's fields, such as `max_tokens`. `.text` is the answer."""
        return await self._link.call(_task.chat(self, messages, more))

    def stream_complete(self, prompt: Prompt, **more: Any) -> AsyncStream:
        """As `complete`, in parts."""
        return AsyncStream(self._link, _task.complete(self, prompt, {**more, "stream": True}))

    def stream_chat(self, messages: Messages, **more: Any) -> AsyncStream:
        """As `chat`, in parts."""
        return AsyncStream(self._link, _task.chat(self, messages, {**more, "stream": True}))

    def stream(self, body: Mapping[str, Any], **options: Unpack[TaskOptions]) -> AsyncStream:
        """Any task that is answered in parts."""
        return AsyncStream(self._link, self._task({**body, "stream": True}, **options))

    async def request(self, body: Body, **options: Unpack[TaskOptions]) -> Reply:
        """Any task: a dict, sent as JSON, or the bytes of a file with its `content_type`.

        A reply may be JSON, a text, or the bytes of any other `content_type`: `content` is one of these.

        Waits for the reply. Raises a TaskError by its `status_code`, TaskTimeout, NoSuchQueue or NotAccepted.
        """
        return await self._link.call(self._task(body, **options))

    def cancel(self, correlation_id: str) -> None:
        """Asks the workers to end a task of this client. It then fails with Cancelled, if one of them holds it.

        To forget a task at once, cancel the asyncio task that awaits it instead.
        """
        self._link.cancel(correlation_id)

    async def _gather(self, call: Call[T]) -> T:
        running: list[asyncio.Task[Answer]] = []
        checked = 0

        async def answer(number: int, task: Task) -> Answer:
            try:
                return await self._link.call(task)
            except TaskError as error:
                return call.failed(number, error)

        try:
            for number, task in enumerate(call.tasks):
                running.append(asyncio.create_task(answer(number, task)))
                # The next task is made when there is room for it, because its time-out begins then.
                await self._link.has_room()
                while checked < len(running) and running[checked].done():
                    running[checked].result()
                    checked += 1
            return call.result(await asyncio.gather(*running))
        finally:
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)


class AsyncStream:
    """The parts of a reply, in order, to be iterated once; then `await result()` gives the whole reply.

    Leaving an `async with` cancels the task; so does breaking off the iteration, as soon as Python drops the iterator.
    A part with `restarted` begins the text anew.
    """

    def __init__(self, link: _Link, task: Task) -> None:
        self._parts: asyncio.Queue[Part | None] = asyncio.Queue()
        self._reply = asyncio.ensure_future(link.call(task, self._parts.put_nowait))
        self._reply.add_done_callback(lambda _: self._parts.put_nowait(None))

    async def __aiter__(self) -> AsyncIterator[Part]:
        try:
            while True:
                part = await self._parts.get()
                if part is None:
                    break
                yield part
            self._parts.put_nowait(None)
            await self.result()
        finally:
            self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        await asyncio.wait({self._reply})

    def cancel(self) -> None:
        """Ends the task, if it has not ended; its reply is then not to be had."""
        self._reply.cancel()

    async def result(self) -> Reply:
        """Waits for the whole reply. Raises its error, or asyncio.CancelledError."""
        return await asyncio.shield(self._reply)


def _decode(frame: bytes) -> None:
    """Raises what aiormq or aio-pika raise on receiving this frame."""
    _, _, decoded = pamqp.frame.unmarshal(frame)
    if isinstance(decoded, ContentHeader):
        channel: Any = None
        aio_pika.IncomingMessage(DeliveredMessage(Basic.Deliver(), decoded, b"", channel))


class _Reader(asyncio.StreamReader):
    """Reads from another reader, but only frames that can be decoded."""

    def __init__(self, source: asyncio.StreamReader) -> None:
        super().__init__()
        self._source, self._frame = source, io.BytesIO()

    def at_eof(self) -> bool:
        return self._frame.tell() == len(self._frame.getbuffer()) and self._source.at_eof()

    async def readexactly(self, n: int) -> bytes:
        # aiormq reads a frame in pieces, and never beyond its end.
        if self._frame.tell() == len(self._frame.getbuffer()):
            start = await self._source.readexactly(_frames.START)
            rest = await self._source.readexactly(_frames.frame_end(start) - len(start))
            self._frame = io.BytesIO(_frames.decodable(start + rest, _decode))
        return self._frame.read(n)


class _Transport:
    """An aiormq.connection.TransportFactory. Python 3.9 has only an aiormq without them."""

    async def create(self, url: URL, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        is_encrypted = url.scheme == "amqps"
        wire = aiormq.connection
        reader, writer = await (wire.TLSTransportFactory if is_encrypted else wire.TCPTransportFactory)().create(
            url, **options
        )
        return _Reader(reader), writer


class _Connection(aio_pika.Connection):
    """A connection that receives only frames that can be decoded."""

    PARAMETERS = aio_pika.Connection.PARAMETERS
    if hasattr(aiormq.connection, "TransportFactory"):
        PARAMETERS += (ConnectionParameter("transport_factory", lambda _: _Transport(), default="", is_kwarg=True),)


@dataclass(eq=False)
class _Session:
    """One connection, from the time when replies can come."""

    connection: AbstractConnection
    channel: AbstractChannel
    reply_to: str
    lost: asyncio.Future[BaseException | None]


@dataclass(eq=False)
class _Waiting:
    """A task without a reply."""

    task: Task
    on_part: Callable[[Part], None] | None
    reply: asyncio.Future[Reply]
    runs: Runs = field(default_factory=Runs)
    reply_to: str = ""
    confirmed: bool = False
    unconfirmed: int = 0
    """How often it was published since the broker confirmed it."""


class _Link:
    """The connection, and all tasks that wait for a reply."""

    def __init__(
        self,
        urls: list[str],
        reply_queue: str | None,
        control_exchange: str | None,
        max_in_flight: int,
        connect_timeout: float,
    ) -> None:
        self._urls, self._connect_timeout = urls, connect_timeout
        self._named_queue, self._control, self._most = reply_queue, control_exchange, max_in_flight
        self._waiting: dict[str, _Waiting] = {}
        self._closed = False
        self._why: BaseException | None = None
        """Why the last connection ended."""
        self._to_cancel: list[_Waiting] = []
        self._looks: dict[str, asyncio.Task[bool]] = {}
        """By their queue, the questions to the broker that are on their way: whether nobody consumes."""
        self._background: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Connects, once. Raises ConnectionFailed."""
        if self._keeper is not None or self._closed:
            return
        self._slots = asyncio.Semaphore(self._most)
        self._session: asyncio.Future[_Session] = asyncio.get_running_loop().create_future()
        failures: list[tuple[str, BaseException | None]] = []
        for number, url in enumerate(self._urls):
            try:
                session = await self._open(number)
                break
            except asyncio.TimeoutError:
                failures.append((url, TimeoutError(f"no answer within {self._connect_timeout} s")))
            except LOST as error:
                failures.append((url, error))
        else:
            raise errors.ConnectionFailed(_broker.failed(failures)) from None
        self._session.set_result(session)
        self._keeper = asyncio.create_task(self._keep(session))

    async def close(self) -> None:
        """Ends all."""
        if self._closed:
            return
        self._closed = True
        session = self._live()
        for waiting in list(self._waiting.values()):
            self._ask_to_cancel(waiting)
            _fail(waiting.reply, errors.ClientClosed("the client was closed before the reply came"))
        if self._background:
            await asyncio.wait(self._background, timeout=HANG_UP_WITHIN)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        if session is not None:
            await _hang_up(session.connection)

    async def has_room(self) -> None:
        """Waits until another task could be published."""
        self._check_connected()
        await asyncio.sleep(0)
        async with self._slots:
            pass

    def _check_connected(self) -> None:
        if self._keeper is None:
            raise errors.SconceError("not connected: use `async with`, or await connect()")

    def cancel(self, correlation_id: str) -> None:
        """Asks for the end of a task; it goes on waiting for the reply."""
        waiting = self._waiting.get(correlation_id)
        if waiting is not None:
            self._ask_to_cancel(waiting)

    async def call(self, task: Task, on_part: Callable[[Part], None] | None = None) -> Reply:
        self._check_connected()
        try:
            return await asyncio.wait_for(self._exchange(task, on_part), task.remaining())
        except asyncio.TimeoutError as error:
            if isinstance(error, errors.SconceError):
                raise
            message = f"no reply from the queue {task.queue!r} within {task.timeout} s"
            session = self._live()
            if session is None:
                message += f" (the broker is away: {_broker.cause(self._why)})"
            elif await self._is_unconsumed(session, task.queue):
                message += _task.NOBODY
            raise errors.TaskTimeout(message) from None

    async def _is_unconsumed(self, session: _Session, queue: str) -> bool:
        """Whether nobody consumes from a queue, as far as that can be known soon. Asks once for all that ask together."""
        look = self._looks.get(queue)
        if look is None:
            look = self._looks[queue] = asyncio.ensure_future(_look(session, queue))
            look.add_done_callback(lambda _: self._looks.pop(queue))
        await asyncio.wait({look}, timeout=_task.LOOK_WITHIN)
        return look.done() and not look.cancelled() and look.result()

    async def _exchange(self, task: Task, on_part: Callable[[Part], None] | None) -> Reply:
        async with self._slots:
            if self._closed:
                raise errors.ClientClosed("the client is closed")
            if task.correlation_id in self._waiting:
                raise ValueError(f"a task with the correlation_id {task.correlation_id!r} is on its way")
            waiting = _Waiting(task, on_part, asyncio.get_running_loop().create_future())
            self._waiting[task.correlation_id] = waiting
            try:
                while not waiting.reply.done():
                    await self._publish_and_wait(waiting)
                return waiting.reply.result()
            except asyncio.CancelledError:
                self._ask_to_cancel(waiting)
                raise
            finally:
                _drop(waiting.reply)
                del self._waiting[task.correlation_id]

    async def _publish_and_wait(self, waiting: _Waiting) -> None:
        """Ends with the reply, or with the connection."""
        connected = self._session  # the keeper puts another one in its place when the connection is lost
        await _first({connected, waiting.reply})
        if waiting.reply.done():
            return
        session = connected.result()
        if session.lost.done():
            await asyncio.sleep(0)
            return
        if not (waiting.confirmed and self._named_queue):
            if waiting.unconfirmed >= _task.PUBLISHED_AT_MOST:
                why = _broker.cause(self._why)
                raise errors.NotAccepted(f"published {waiting.unconfirmed} times, never confirmed: {why}")
            waiting.unconfirmed += 1
            publishing = asyncio.ensure_future(self._publish(session, waiting))
            try:
                # The reply can overtake the confirm.
                await _first({publishing, waiting.reply, session.lost})
                if publishing.done() and not publishing.cancelled():
                    publishing.result()
            finally:
                _drop(publishing)
        await _first({session.lost, waiting.reply})

    async def _publish(self, session: _Session, waiting: _Waiting) -> None:
        task = waiting.task
        milliseconds = task.expires_in_ms()
        expiration = None if milliseconds is None else milliseconds / 1000
        message = aio_pika.Message(task.body, expiration=expiration, **task.properties(session.reply_to))
        waiting.reply_to, waiting.confirmed = session.reply_to, False
        try:
            await session.channel.default_exchange.publish(message, task.queue, mandatory=True)
            waiting.confirmed, waiting.unconfirmed = True, 0
        except DeliveryError as error:
            if isinstance(error, PublishError):
                raise errors.NoSuchQueue(task.queue) from None
            raise errors.NotAccepted(f"the queue {task.queue!r} does not take the task") from None
        except LOST as error:
            _end(session.lost, error)
        except asyncio.CancelledError:  # by this client, or by aio-pika as it loses the connection
            if session.channel.is_closed:
                _end(session.lost, None)
            raise

    # The connection.

    def _live(self) -> _Session | None:
        if self._keeper is None or not self._session.done():
            return None
        session = self._session.result()
        return None if session.lost.done() else session

    async def _open(self, number: int) -> _Session:
        url = self._urls[number % len(self._urls)]
        connection = await asyncio.wait_for(aio_pika.connect(url, connection_class=_Connection), self._connect_timeout)
        try:
            channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            name = self._named_queue
            queue = await (channel.get_queue(name) if name else channel.declare_queue(exclusive=True))
            session = _Session(connection, channel, queue.name, asyncio.get_running_loop().create_future())
            channel.close_callbacks.add(lambda _, error=None: _end(session.lost, error))
            connection.close_callbacks.add(lambda _, error=None: _end(session.lost, error))
            await queue.consume(self._on_message, no_ack=not name, exclusive=True)
            return session
        except BaseException:
            await connection.close()
            raise

    async def _keep(self, session: _Session) -> None:
        """Connects again, whenever a connection is lost."""
        attempts = 0
        while True:
            ready_at = time.monotonic()
            self._why = await session.lost
            self._session = asyncio.get_running_loop().create_future()
            if time.monotonic() - ready_at > _broker.SETTLED_AFTER:
                attempts = 0
            self._spawn(_hang_up(session.connection))  # still open, if only its channel was lost
            while not self._session.done():
                delay = min(LONGEST_DELAY, 0.1 * 2.0 ** min(attempts, 10)) * random.uniform(0.5, 1.0)
                LOG.warning("lost the broker (%s); connecting again in %.1f s", _broker.cause(self._why), delay)
                await asyncio.sleep(delay)
                try:
                    session = await self._open(attempts)
                    self._session.set_result(session)
                except (*LOST, asyncio.TimeoutError) as error:
                    self._why = error
                attempts += 1

    async def _on_message(self, message: AbstractIncomingMessage) -> None:
        self._take(message)  # before anything is awaited: parts would change their order
        if self._named_queue:
            try:
                await message.ack()
            except LOST as error:
                LOG.debug("it will come again: %r", error)

    def _take(self, message: AbstractIncomingMessage) -> None:
        waiting = self._waiting.get(message.correlation_id or "")
        if waiting is None or waiting.reply.done():  # a second reply, or one that came too late
            _wire.warn_of_undecodable(message.headers, self._named_queue)
            return
        try:
            if message.type != _task.PART:
                correlation_id = waiting.task.correlation_id
                waiting.reply.set_result(
                    _wire.reply(message.body, message.content_type, correlation_id, message.headers)
                )
            elif waiting.on_part is not None:
                part = waiting.runs.part(message.headers, message.body, message.content_type)
                if part is not None:
                    waiting.on_part(part)
        except errors.SconceError as error:
            _fail(waiting.reply, error)

    def _ask_to_cancel(self, waiting: _Waiting) -> None:
        if waiting.reply_to and self._control:
            self._to_cancel.append(waiting)
            if len(self._to_cancel) == 1:
                self._spawn(self._send_cancellations(self._control))

    async def _send_cancellations(self, exchange: str) -> None:
        await asyncio.sleep(0)  # until all that are cancelled together are known
        session, these, self._to_cancel = self._live(), self._to_cancel, []
        if session is None:
            return
        try:
            # On a channel of its own, which the broker closes where the exchange does not exist. It is asked for first: were it
            # closed after `close` is sent, aiormq would take the answer to that for one to the next channel.
            channel = await session.connection.channel(publisher_confirms=False)
            control = await channel.get_exchange(exchange)
            for waiting in these:
                message = aio_pika.Message(
                    b"",
                    type=_task.CANCEL,
                    correlation_id=waiting.task.correlation_id,
                    reply_to=waiting.reply_to,
                    headers=_task.published_now(),
                )
                await control.publish(message, "cancel", mandatory=False)
            await channel.close()
        except LOST as error:
            LOG.debug("cancelling: %r", error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _look(session: _Session, queue: str) -> bool:
    try:
        # On a channel of its own, which the broker closes where this user may not look.
        channel = await session.connection.channel(publisher_confirms=False)
        declared = await channel.declare_queue(queue, passive=True)
        await channel.close()
        return declared.declaration_result.consumer_count == 0
    except LOST as error:
        LOG.debug("looking for consumers: %r", error)
        return False


def _end(lost: asyncio.Future[BaseException | None], error: BaseException | None) -> None:
    if not lost.done():
        lost.set_result(error)


def _fail(reply: asyncio.Future[Reply], error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)


def _drop(future: asyncio.Future[Any]) -> None:
    """Nobody reads its result any more; asyncio would complain about an error that nobody has read."""
    if not future.cancel() and not future.cancelled():
        future.exception()


async def _hang_up(connection: AbstractConnection) -> None:
    try:
        await asyncio.wait_for(connection.close(), HANG_UP_WITHIN)
    except (*LOST, asyncio.TimeoutError) as error:
        LOG.debug("closing: %r", error)


async def _first(futures: set[asyncio.Future[Any]]) -> None:
    """Waits for the first of these, and leaves them all as they are."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
