"""The client for threads, over pika."""

from __future__ import annotations

import logging
import math
import os
import queue as queues
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Literal, TypeVar, overload

import pika
import pika.frame
import pika.spec
from pika.adapters.select_connection import IOLoop
from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter
from pika.channel import Channel
from pika.exceptions import AMQPError

from . import _broker, _frames, _task, _wire, errors
from ._reply import Classified, Entity, Label, Part, Ranked, Reply, Transcript
from ._task import Answer, Body, Call, Defaults, File, Messages, Prompt, Task, TaskOptions, Texts
from ._wire import Runs
from .errors import InputError, TaskError

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray
    from pika.adapters.utils.nbio_interface import AbstractIOReference, AbstractStreamProtocol
    from typing_extensions import Self, Unpack

LOG = logging.getLogger("sconce_client")
LONGEST_DELAY = 30.0
HANG_UP_WITHIN = 5.0
T = TypeVar("T")


class Client(Defaults):
    """Publishes tasks and waits for their replies. Threads may share it; processes may not (make it after a fork).

    One thread of its own holds the connection and its heartbeats. After a lost connection it connects again and
    publishes what has no reply yet, so a task may be computed twice; second replies are dropped.
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
        """Connects. Raises ConnectionFailed.

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. What has no reply yet is cancelled, and fails with ClientClosed."""
        self._link.close()

    @overload
    def embed(
        self, texts: Iterable[str], *, errors: Literal["each"], rows_per_task: int = ..., **more: Any
    ) -> list[list[float] | InputError]: ...

    @overload
    def embed(
        self, texts: Iterable[str], *, as_array: Literal[True], rows_per_task: int = ..., **more: Any
    ) -> NDArray[numpy.float32]: ...

    @overload
    def embed(self, texts: Iterable[str], *, rows_per_task: int = ..., **more: Any) -> list[list[float]]: ...

    def embed(
        self, texts: Iterable[str], *, as_array: bool = False, rows_per_task: int = _task.ROWS_PER_TASK, **more: Any
    ) -> Any:
        """One vector for each text, in order: lists of floats; with `as_array` the rows of a numpy array of float32.

        A text that is longer than the model takes is cut, and TextsTruncated is warned of; `truncate=False` has it
        refused. With `errors="each"` a text that is refused has an InputError in its place; else it fails the call.
        `more` are further fields of the body, such as `model`, `dimensions` and `prompt_name`. A time-out is for each
        task of `rows_per_task` texts, not for all of them.
        """
        packs = _task.text_packs(texts, rows_per_task)
        return self._gather(_task.embed(self, packs, as_array, more))

    @overload
    def embed_tokens(
        self, inputs: Iterable[Sequence[int]], *, errors: Literal["each"], rows_per_task: int = ..., **more: Any
    ) -> list[list[float] | InputError]: ...

    @overload
    def embed_tokens(
        self, inputs: Iterable[Sequence[int]], *, as_array: Literal[True], rows_per_task: int = ..., **more: Any
    ) -> NDArray[numpy.float32]: ...

    @overload
    def embed_tokens(
        self, inputs: Iterable[Sequence[int]], *, rows_per_task: int = ..., **more: Any
    ) -> list[list[float]]: ...

    def embed_tokens(
        self,
        inputs: Iterable[Sequence[int]],
        *,
        as_array: bool = False,
        rows_per_task: int = _task.ROWS_PER_TASK,
        **more: Any,
    ) -> Any:
        """As `embed`, for lists of token ids of the model's own tokenizer."""
        packs = _task.token_packs(inputs, rows_per_task)
        return self._gather(_task.embed(self, packs, as_array, more))

    def embed_images(
        self, images: Iterable[File], *, as_array: bool = False, rows_per_task: int = 8, **more: Any
    ) -> Any:
        """One vector for each image, in order, by a model of texts and images: its vectors of texts, which `embed` gives,
        lie in the same space. The images are JPEG, PNG or WebP files: paths, bytes, or URLs from which a worker fetches
        them. The result and `more` are as for `embed`. With `errors="each"` a file that cannot be read, or is no image, has
        an InputError in its place, too.
        """
        packs = _task.image_packs(images, rows_per_task, _task.is_each(more))
        return self._gather(_task.embed(self, packs, as_array, more))

    def embed_sparse(
        self, texts: Iterable[str], *, rows_per_task: int = _task.ROWS_PER_TASK, **more: Any
    ) -> list[dict[int, float]]:
        """The sparse vector of each text, in order, by a SPLADE model: its numbers by the ids of tokens. All are above 0.

        `more` are further fields of the body: `top_k` and `threshold`, which leave out small numbers, `prompt_name`,
        `truncate` and `model`.
        """
        return self._gather(_task.embed_sparse(self, texts, rows_per_task, more))

    def rerank(self, query: str, documents: Iterable[str], *, top_n: int | None = None, **more: Any) -> list[Ranked]:
        """The documents by how well they answer the query, best first. Scores are between 0 and 1.

        All documents are one task: at most `pool.max_inputs` of them. `instruction` says what makes a document relevant, for
        models whose prompts have an instruction.
        """
        return self._gather(_task.rerank(self, query, documents, {**more, "top_n": top_n}))

    def score(self, text_1: Texts, text_2: Texts, **more: Any) -> list[float]:
        """A score for each pair: of one text with one or many, or of two lists of the same length."""
        return self._gather(_task.score(self, text_1, text_2, more))

    @overload
    def classify(
        self, texts: Iterable[str], *, labels: Sequence[str], rows_per_task: int = ..., **more: Any
    ) -> list[list[Label]]: ...

    @overload
    def classify(self, texts: Iterable[str], *, rows_per_task: int = ..., **more: Any) -> list[Classified]: ...

    def classify(
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
            return self._gather(_task.classify_by(self, texts, labels, rows_per_task, more))
        return self._gather(_task.classify(self, texts, rows_per_task, more))

    def token_labels(
        self, texts: Iterable[str], *, rows_per_task: int = _task.ROWS_PER_TASK, **more: Any
    ) -> list[list[Entity]]:
        """The names and other entities in each text, in order. `more` are the fields of such a request:
        `aggregation_strategy`, `ignore_labels`, and `stride`, with which long texts are read in windows."""
        return self._gather(_task.token_labels(self, texts, rows_per_task, more))

    def classify_image(
        self, image: File, content_type: str | None = None, *, top_k: int | None = None, **more: Any
    ) -> list[Label]:
        """What is on a picture, likeliest first. The image is a JPEG, PNG or WebP file: its path, its
        bytes, or a URL from which a worker fetches it. A model of texts and images takes `labels`, a list of texts."""
        return self._gather(_task.classify_image(self, image, content_type, {**more, "top_k": top_k}))

    def caption(self, image: File, content_type: str | None = None, **more: Any) -> str:
        """A text that describes an image, which is given as for `classify_image`. `more` are the fields of such a request:
        `prompt`, the beginning of the text, and `max_new_tokens`."""
        return self._gather(_task.caption(self, image, content_type, more))

    def generate_images(self, prompt: str, **more: Any) -> list[bytes]:
        """Images of a text, as the bytes of PNG files. `more` are the fields of such a request: `n`, `size` ("512x512"),
        `steps`, `seed`, `negative_prompt` and `guidance_scale`. For the progress there is `stream`."""
        return self._gather(_task.generate_images(self, prompt, more))

    def transcribe(
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
        return self._gather(_task.transcribe(self, sound, content_type, translate, words, more))

    def voices(self) -> list[str]:
        """The names of the voices that `speak` takes."""
        return self._gather(_task.voices(self))

    def speak(self, text: str, **more: Any) -> bytes:
        """The sound of a text, as the bytes of a WAV file. `more` are the fields of such a request, such as `voice`,
        `speed`, `seed`, and `response_format` ("wav", "pcm" or "flac"). With `phonemes` the text is not read.

        For each sentence as soon as it is spoken, there is `stream`.
        """
        return self._gather(_task.speak(self, text, more))

    def complete(self, prompt: Prompt, **more: Any) -> Reply:
        """Continues a text. `more` are OpenAI's fields, such as `max_tokens`. `.text` is the text."""
        return self._call(_task.complete(self, prompt, more))

    def chat(self, messages: Messages, **more: Any) -> Reply:
        """Answers a chat: one text, or messages. `more` are OpenAI's fields, such as `max_tokens`. `.text` is the answer."""
        return self._call(_task.chat(self, messages, more))

    def stream_complete(self, prompt: Prompt, **more: Any) -> Stream:
        """As `complete`, in parts."""
        return Stream(self._link, _task.complete(self, prompt, {**more, "stream": True}))

    def stream_chat(self, messages: Messages, **more: Any) -> Stream:
        """As `chat`, in parts."""
        return Stream(self._link, _task.chat(self, messages, {**more, "stream": True}))

    def stream(self, body: Mapping[str, Any], **options: Unpack[TaskOptions]) -> Stream:
        """Any task that is answered in parts."""
        return Stream(self._link, self._task({**body, "stream": True}, **options))

    def request(self, body: Body, **options: Unpack[TaskOptions]) -> Reply:
        """Any task: a dict, sent as JSON, or the bytes of a file with its `content_type`.

        A reply may be JSON, a text, or the bytes of any other `content_type`: `content` is one of these.

        Waits for the reply. Raises a TaskError by its `status_code`, TaskTimeout, NoSuchQueue or NotAccepted.
        """
        return self._call(self._task(body, **options))

    def submit(self, body: Body, **options: Unpack[TaskOptions]) -> Future[Reply]:
        """As `request`, but gives a future. Cancelling it cancels the task.

        Waits itself only while `max_in_flight` tasks are on their way.
        """
        return self._link.submit(self._task(body, **options))

    def cancel(self, correlation_id: str) -> None:
        """Asks the workers to end a task of this client. It then fails with Cancelled, if one of them holds it.

        To forget a task at once, cancel its future instead.
        """
        self._link.cancel(correlation_id)

    def _call(self, task: Task) -> Reply:
        future = self._link.submit(task)
        try:
            return future.result()
        finally:
            future.cancel()

    def _gather(self, call: Call[T]) -> T:
        futures: list[Future[Reply]] = []
        answers: list[Answer] = []

        def take() -> None:
            try:
                answers.append(futures[len(answers)].result())
            except TaskError as error:
                answers.append(call.failed(len(answers), error))

        try:
            for task in call.tasks:
                futures.append(self._link.submit(task))
                # So that an early error ends the call early.
                while len(answers) < len(futures) and futures[len(answers)].done():
                    take()
            while len(answers) < len(futures):
                take()
            return call.result(answers)
        finally:
            for future in futures:
                future.cancel()


class Stream:
    """The parts of a reply, in order, to be iterated once; then `result` gives the whole reply.

    Breaking off the iteration, or leaving a `with`, cancels the task. A part with `restarted` begins the text anew.
    """

    def __init__(self, link: _Link, task: Task) -> None:
        self._parts: queues.SimpleQueue[Part | None] = queues.SimpleQueue()
        self._future = link.submit(task, self._parts.put)
        self._future.add_done_callback(lambda _: self._parts.put(None))

    def __iter__(self) -> Iterator[Part]:
        try:
            yield from iter(self._parts.get, None)
            self._parts.put(None)
            self._future.result()
        finally:
            self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Ends the task, if it has not ended; its reply is then not to be had."""
        self._future.cancel()

    def result(self) -> Reply:
        """Waits for the whole reply. Raises its error, or concurrent.futures.CancelledError."""
        return self._future.result()


@dataclass(eq=False)
class _Waiting:
    """A task without a reply."""

    task: Task
    on_part: Callable[[Part], None] | None
    future: Future[Reply] = field(default_factory=Future)
    runs: Runs = field(default_factory=Runs)
    timer: Any = None
    session: int = 0
    """The connection that it was published on last, counted from 1."""
    reply_to: str = ""
    confirmed: bool = False
    unconfirmed: int = 0
    """How often it was published since the broker confirmed it."""

    def settle(self, result: Reply | Exception) -> None:
        """Ends the future. On the thread of the link alone: only the user's `cancel` can come in between."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


class _Services(SelectorIOServicesAdapter):
    """What pika makes of its loop, with connections that receive only frames that pika can decode."""

    def create_streaming_connection(
        self, protocol_factory: Callable[[], AbstractStreamProtocol], *arguments: Any, **options: Any
    ) -> AbstractIOReference:
        def filtered() -> AbstractStreamProtocol:
            protocol, frames = protocol_factory(), _frames.Frames(pika.frame.decode_frame)
            receive = protocol.data_received
            protocol.data_received = lambda data: receive(frames.feed(data))  # type: ignore[method-assign]
            return protocol

        return super().create_streaming_connection(filtered, *arguments, **options)


class _Link:
    """The connection, and all tasks that wait. Its thread runs all methods but `submit`, `cancel` and `close`."""

    def __init__(
        self,
        urls: list[str],
        reply_queue: str | None,
        control_exchange: str | None,
        max_in_flight: int,
        connect_timeout: float,
    ) -> None:
        self._urls, self._parameters = urls, [pika.URLParameters(url) for url in urls]
        self._failures: list[tuple[str, BaseException | None]] = []
        """Addresses that were tried in vain before the first connection, and why."""
        self._named_queue, self._control, self._most = reply_queue, control_exchange, max_in_flight
        self._waiting: dict[str, _Waiting] = {}
        self._room = threading.Condition()
        self._closing = self._ended = False
        self._process = os.getpid()

        self._loop = IOLoop()
        self._services = _Services(self._loop)  # type: ignore[arg-type] # as pika does; its stubs see no such loop in it
        self._connection: pika.SelectConnection | None = None
        self._channel: Channel | None = None
        self._reply_to = ""
        self._session = self._attempts = self._tag = 0
        self._ready_at = math.inf
        self._tags: dict[int, _Waiting] = {}
        self._to_cancel: list[_Waiting] = []
        self._expired: dict[str, list[_Waiting]] = {}
        """By their queue, tasks whose time is over while the broker is asked who consumes from it."""
        self._why: BaseException | None = None
        """Why the last connection ended."""
        self._channel_why: BaseException | None = None
        self._connected: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="sconce-client", daemon=True)
        self._thread.start()
        try:
            self._connected.result(connect_timeout)
        except BaseException as error:
            self.close()
            if isinstance(error, FutureTimeout):
                late = TimeoutError(f"no answer within {connect_timeout} s")
                failures = [*self._failures, (urls[len(self._failures) % len(urls)], late)]
                raise errors.ConnectionFailed(_broker.failed(failures)) from None
            raise

    def submit(self, task: Task, on_part: Callable[[Part], None] | None = None) -> Future[Reply]:
        """Publishes a task, once there is room for it."""
        if os.getpid() != self._process:
            raise errors.SconceError("this client was made before a fork: make one in each process")
        waiting = _Waiting(task, on_part)
        with self._room:
            # A callback of a future may submit another task; were it to wait here, nothing would ever come.
            while len(self._waiting) >= self._most and not self._closing and not self._is_mine():
                if not self._room.wait(task.remaining()):
                    raise errors.TaskTimeout(f"{self._most} tasks were on their way for {task.timeout} s")
            if self._closing:
                raise errors.ClientClosed("the client is closed")
            if task.correlation_id in self._waiting:
                raise ValueError(f"a task with the correlation_id {task.correlation_id!r} is on its way")
            self._waiting[task.correlation_id] = waiting
        waiting.future.add_done_callback(lambda _: self._forget(waiting))
        self._soon(partial(self._begin, waiting))
        return waiting.future

    def cancel(self, correlation_id: str) -> None:
        """Asks for the end of a task; it goes on waiting for the reply."""
        with self._room:
            waiting = self._waiting.get(correlation_id)
        if waiting is not None:
            self._soon(partial(self._ask_to_cancel, waiting))

    def close(self) -> None:
        """Ends all, and the thread."""
        with self._room:
            begins, self._closing = not self._closing, True
            self._room.notify_all()
        if begins:
            self._soon(self._shut)
        if not self._is_mine() and os.getpid() == self._process:
            self._thread.join()

    def _is_mine(self) -> bool:
        return threading.current_thread() is self._thread

    def _soon(self, callback: Callable[[], object]) -> None:
        with self._room:
            if not self._ended:
                self._loop.add_callback_threadsafe(callback)

    def _forget(self, waiting: _Waiting) -> None:
        with self._room:
            self._waiting.pop(waiting.task.correlation_id, None)
            self._room.notify()
        self._soon(partial(self._forgotten, waiting))

    def _forgotten(self, waiting: _Waiting) -> None:
        if waiting.timer is not None:
            self._loop.remove_timeout(waiting.timer)
            waiting.timer = None
        if waiting.future.cancelled():
            waiting.future.set_running_or_notify_cancel()
            self._ask_to_cancel(waiting)

    def _run(self) -> None:
        try:
            self._loop.add_callback_threadsafe(self._connect)
            self._loop.start()
        except Exception as error:
            LOG.exception("the connection's thread has failed")
            self._why = error
        finally:
            with self._room:
                self._closing = self._ended = True
                self._room.notify_all()
                left = list(self._waiting.values())
            if not self._connected.done():
                self._connected.set_exception(errors.ConnectionFailed(_broker.failed(self._failures)))
            why = _broker.cause(self._why)
            for waiting in left:
                waiting.settle(errors.ClientClosed(f"the client is closed, and no reply came: {why}"))
            self._loop.close()

    # Connecting: open, channel, confirms, reply queue, consumer, ready.

    def _connect(self) -> None:
        if self._closing:
            return
        parameters = self._parameters[self._attempts % len(self._parameters)]
        self._attempts += 1
        try:
            self._connection = pika.SelectConnection(
                parameters, self._on_open, self._on_lost, self._on_lost, custom_ioloop=self._services
            )
        except (AMQPError, OSError) as error:
            self._on_lost(None, error)

    def _on_open(self, connection: pika.SelectConnection) -> None:
        connection.channel(on_open_callback=self._on_channel)

    def _on_channel(self, channel: Channel) -> None:
        channel.add_on_close_callback(self._on_channel_closed)
        channel.add_on_cancel_callback(lambda _: channel.close())
        channel.add_on_return_callback(self._on_return)
        channel.confirm_delivery(self._on_confirm, callback=lambda _: self._on_confirming(channel))

    def _on_confirming(self, channel: Channel) -> None:
        if self._named_queue:
            self._consume(channel, self._named_queue)
        else:
            channel.queue_declare("", exclusive=True, callback=lambda frame: self._consume(channel, frame.method.queue))

    def _consume(self, channel: Channel, queue: str) -> None:
        ready = partial(self._on_ready, channel, queue)
        channel.basic_consume(queue, self._on_message, not self._named_queue, True, callback=lambda _: ready())

    def _on_ready(self, channel: Channel, queue: str) -> None:
        self._channel, self._reply_to = channel, queue
        self._session += 1
        self._tag, self._ready_at = 0, time.monotonic()
        if not self._connected.done():
            self._connected.set_result(None)
        with self._room:
            waiting = list(self._waiting.values())
        for one in waiting:
            self._publish(one)

    def _on_channel_closed(self, channel: Channel, reason: Exception) -> None:
        self._channel, self._channel_why = None, reason
        if self._connection is not None and self._connection.is_open:
            self._connection.close()

    def _on_lost(self, _: pika.SelectConnection | None, reason: BaseException) -> None:
        if time.monotonic() - self._ready_at > _broker.SETTLED_AFTER:
            self._attempts = 0
        self._ready_at = math.inf
        # A channel that the broker has closed says more than the connection, which was then closed here.
        self._why, self._channel_why = self._channel_why or reason, None
        self._channel, self._connection = None, None
        self._tags.clear()
        if not self._connected.done():
            self._failures.append((self._urls[(self._attempts - 1) % len(self._urls)], self._why))
        if self._closing:
            self._loop.stop()
        elif not self._connected.done() and self._attempts >= len(self._parameters):
            self._connected.set_exception(errors.ConnectionFailed(_broker.failed(self._failures)))
        else:
            delay = min(LONGEST_DELAY, 0.1 * 2.0 ** min(self._attempts, 10)) * random.uniform(0.5, 1.0)
            LOG.warning("lost the broker (%s); connecting again in %.1f s", _broker.cause(self._why), delay)
            self._loop.call_later(delay, self._connect)

    # Tasks and replies.

    def _begin(self, waiting: _Waiting) -> None:
        remaining = waiting.task.remaining()
        if remaining is not None and not waiting.future.done():
            waiting.timer = self._loop.call_later(remaining, partial(self._expire, waiting))
        self._publish(waiting)

    def _expire(self, waiting: _Waiting) -> None:
        waiting.timer = None
        self._ask_to_cancel(waiting)
        queue = waiting.task.queue
        these = self._expired.setdefault(queue, [])
        these.append(waiting)
        if len(these) == 1:
            self._look(queue, these)

    def _look(self, queue: str, these: list[_Waiting]) -> None:
        """Ends tasks whose time is over, once it is known whether anybody consumes from their queue."""

        def end(more: str = "") -> None:
            if self._expired.get(queue) is these:
                del self._expired[queue]
            for waiting in these:
                message = f"no reply from the queue {queue!r} within {waiting.task.timeout} s{more}"
                waiting.settle(errors.TaskTimeout(message))

        def declared(channel: Channel, consumers: int) -> None:
            end("" if consumers else _task.NOBODY)
            channel.close()

        def declare(channel: Channel) -> None:
            channel.queue_declare(
                queue, passive=True, callback=lambda frame: declared(channel, frame.method.consumer_count)
            )

        connection = self._connection
        if self._channel is None or connection is None or not connection.is_open:
            end(f" (the broker is away: {_broker.cause(self._why)})")
            return
        self._loop.call_later(_task.LOOK_WITHIN, end)
        # On a channel of its own, which the broker closes where this user may not look.
        connection.channel(on_open_callback=declare).add_on_close_callback(lambda *_: end())

    def _publish(self, waiting: _Waiting) -> None:
        has_reply_queue = waiting.confirmed and self._named_queue is not None
        if self._channel is None or not self._channel.is_open or has_reply_queue or waiting.future.done():
            return
        if waiting.session == self._session:  # it is published already
            return
        task = waiting.task
        if waiting.unconfirmed >= _task.PUBLISHED_AT_MOST:
            waiting.settle(self._never_confirmed(waiting))
            return
        expiration = task.expires_in_ms()
        properties = pika.BasicProperties(
            expiration=None if expiration is None else str(expiration), **task.properties(self._reply_to)
        )
        waiting.session, waiting.reply_to, waiting.confirmed = self._session, self._reply_to, False
        try:
            self._channel.basic_publish("", task.queue, task.body, properties, mandatory=True)
        except Exception as error:  # noqa: BLE001 - what AMQP cannot encode, such as a priority of 1000
            waiting.settle(error)
            return
        waiting.unconfirmed += 1
        self._tag += 1
        self._tags[self._tag] = waiting

    def _never_confirmed(self, waiting: _Waiting) -> errors.NotAccepted:
        why = _broker.cause(self._why)
        return errors.NotAccepted(f"published {waiting.unconfirmed} times, never confirmed: {why}")

    def _on_confirm(self, frame: Any) -> None:
        last = frame.method.delivery_tag
        for tag in [tag for tag in self._tags if tag <= last] if frame.method.multiple else [last]:
            waiting = self._tags.pop(tag, None)
            if waiting is None:
                continue
            waiting.confirmed, waiting.unconfirmed = True, 0
            if isinstance(frame.method, pika.spec.Basic.Nack):
                waiting.settle(errors.NotAccepted(f"the queue {waiting.task.queue!r} does not take the task"))

    def _on_return(self, _: Channel, __: Any, properties: pika.BasicProperties, ___: bytes) -> None:
        waiting = self._waiting.get(properties.correlation_id or "")
        if waiting is not None:
            waiting.settle(errors.NoSuchQueue(waiting.task.queue))

    def _on_message(self, channel: Channel, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        if self._named_queue:
            channel.basic_ack(method.delivery_tag)
        waiting = self._waiting.get(properties.correlation_id or "")
        headers = properties.headers or {}
        if waiting is None:  # a second reply, or one that came too late
            _wire.warn_of_undecodable(headers, self._named_queue)
            return
        try:
            if properties.type != _task.PART:
                waiting.settle(_wire.reply(body, properties.content_type, waiting.task.correlation_id, headers))
            elif waiting.on_part is not None:
                part = waiting.runs.part(headers, body, properties.content_type)
                if part is not None:
                    waiting.on_part(part)
        except errors.SconceError as error:
            waiting.settle(error)

    # Cancelling and closing.

    def _ask_to_cancel(self, waiting: _Waiting) -> None:
        if waiting.reply_to and self._control:
            self._to_cancel.append(waiting)
            if len(self._to_cancel) == 1:
                self._loop.call_later(0, self._send_cancellations)

    def _send_cancellations(self, then: Callable[[], object] = lambda: None) -> None:
        these, self._to_cancel = self._to_cancel, []
        connection, exchange = self._connection, self._control
        if not these or connection is None or not connection.is_open or exchange is None:
            then()
            return

        def publish(channel: Channel) -> None:
            for waiting in these:
                properties = pika.BasicProperties(
                    type=_task.CANCEL,
                    correlation_id=waiting.task.correlation_id,
                    reply_to=waiting.reply_to,
                    headers=_task.published_now(),
                )
                channel.basic_publish(exchange, "cancel", b"", properties)
            channel.close()

        # On a channel of its own, which the broker closes where the exchange does not exist.
        connection.channel(on_open_callback=publish).add_on_close_callback(lambda *_: then())

    def _shut(self) -> None:
        with self._room:
            left = list(self._waiting.values())
        for waiting in left:
            self._ask_to_cancel(waiting)
            waiting.settle(errors.ClientClosed("the client was closed before the reply came"))
        self._loop.call_later(HANG_UP_WITHIN, self._loop.stop)
        self._send_cancellations(self._hang_up)

    def _hang_up(self) -> None:
        if self._connection is not None and self._connection.is_open:
            self._connection.close()
        else:
            self._loop.stop()
