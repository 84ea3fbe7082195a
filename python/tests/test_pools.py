"""What the clients do over real workers."""

from __future__ import annotations

import runpy
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Callable

import numpy
import pika
import pytest
from conftest import POOLS, ROOT, Broker, Sconce, until
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from sconce_client import (
    AsyncClient,
    BadReply,
    BadRequest,
    Cancelled,
    Client,
    InputError,
    NotServed,
    Reply,
    ReplyWarning,
    TaskError,
    TaskTimeout,
    TextsTruncated,
    TooLarge,
)

WORDS = ["wax", "a candle", "sconce", "the light on the wall", "river", "a cat sat", "queues", "ten thousand tasks"]
TEXTS = [f"{word} and {number}" for number in range(7) for word in WORDS]
CHAT = [{"role": "user", "content": "Say hello."}]
PHOTOS = ROOT / "examples/images"


def cosines(one: Any, other: Any) -> Any:
    first, second = numpy.asarray(one), numpy.asarray(other)
    return (first * second).sum(axis=1) / numpy.linalg.norm(first, axis=1) / numpy.linalg.norm(second, axis=1)


def test_vectors_stand_in_the_order_of_the_texts(client: Any) -> None:
    pool = client.with_options(queue="embed")
    vectors = pool.embed(TEXTS, rows_per_task=5)
    assert {(type(vector), type(vector[0]), len(vector)) for vector in vectors} == {(list, float, 384)}
    assert len(vectors) == len(TEXTS)
    array = pool.embed(TEXTS, rows_per_task=5, as_array=True)
    assert (array.dtype, array.shape) == (numpy.dtype("float32"), (len(TEXTS), 384))
    numpy.testing.assert_allclose(array, vectors, atol=1e-5)
    body = client.request({"input": TEXTS}, queue="embed", url="/v1/embeddings").json()
    assert cosines(vectors, [item["embedding"] for item in body["data"]]).min() > 0.9999
    # No two texts are that alike: another order would show.
    assert cosines(vectors[:-1], vectors[1:]).max() < 0.99


def test_both_clients_get_the_same_vectors(connect: Callable[..., Any], broker: Broker, sconce: Sconce) -> None:
    mine = connect(queue="embed").embed(TEXTS, rows_per_task=4)
    with Client(broker.url, queue="embed") as other:
        theirs = other.embed(iter(TEXTS), rows_per_task=len(TEXTS))
    numpy.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert connect(queue="embed").embed([]) == []


def test_token_ids_are_embedded_by_a_method_of_their_own(client: Any) -> None:
    pool = client.with_options(queue="embed")
    with pytest.raises(TypeError, match="embed_tokens"):
        pool.embed([101, 2003, 102])
    one = pool.embed_tokens([[101, 13844, 102], [1037]], rows_per_task=1, as_array=True)
    assert one.shape == (2, 384) and cosines(one, pool.embed(["wax", "a"])).min() > 0.9999


def bad(found: list[Any]) -> list[int | None]:
    """The index that each error names."""
    return [one.index if isinstance(one, InputError) else None for one in found]


def test_an_error_names_the_callers_input(client: Any) -> None:
    pool = client.with_options(queue="embed")
    ids = [[101], [101], [101], [101, 4_000_000_000], [101]]
    with pytest.raises(BadRequest, match=r"input\[3\]") as caught:
        pool.embed_tokens(ids, rows_per_task=2)
    assert (caught.value.index, caught.value.param) == (3, "input[3]")

    found = pool.embed_tokens(ids, rows_per_task=2, errors="each")
    assert [type(one) for one in found] == [list, list, list, InputError, list]
    assert (found[3].index, found[3].param) == (3, "input[3]") and "input[3]" in str(found[3])
    # The last two are one task, which fails because both are bad.
    found = pool.embed_tokens([ids[0], ids[0], ids[3], ids[3]], rows_per_task=2, errors="each")
    assert bad(found) == [None, None, 2, 3]
    with pytest.raises(BadRequest, match="dimensions"):
        pool.embed(TEXTS, errors="each", dimensions=0)
    with pytest.raises(ValueError, match="as_array"):
        pool.embed(TEXTS, errors="each", as_array=True)


def test_a_text_that_is_cut_is_warned_of(client: Any) -> None:
    pool = client.with_options(queue="embed")
    texts = ["wax", "wax " * 1000, "a cat", "cat " * 1000]
    with pytest.warns(TextsTruncated, match="2 texts were longer than the model takes") as warned:
        pool.embed(texts, rows_per_task=2)
    assert len(warned) == 1
    with pytest.raises(BadRequest, match=r"input\[1\]"):
        pool.embed(texts, rows_per_task=2, truncate=False)
    each = pool.embed(texts, rows_per_task=2, truncate=False, errors="each")
    assert bad(each) == [None, 1, None, 3]
    assert client.request({"input": texts}, queue="embed").truncated == 2


def test_a_warning_names_the_line_of_the_caller(broker: Broker, sconce: Sconce) -> None:
    with Client(broker.url, queue="embed") as client, pytest.warns(TextsTruncated) as warned:
        client.embed(["wax " * 1000])
    assert warned[0].filename == __file__


def test_an_early_error_ends_a_long_call(connect: Callable[..., Any], sconce: Sconce) -> None:
    def texts() -> Any:
        for _ in range(100_000):
            yield ""  # an empty text is fine; the field is not
        raise AssertionError("all texts were taken")

    with pytest.raises(BadRequest) as caught:
        connect(queue="embed", max_in_flight=4).embed(texts(), rows_per_task=1, dimensions=0)
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize(
    ("body", "options", "kind", "param"),
    [
        ({"input": [1.5]}, {}, BadRequest, "input[0]"),
        ({"input": "a", "dimension": 3}, {}, BadRequest, "dimension"),
        ({"input": "a", "model": "another"}, {}, NotServed, "model"),
        ({"input": "a"}, {"url": "/v1/nowhere"}, NotServed, "url"),
        (b"{", {}, BadRequest, None),
        (b"RIFF", {"content_type": "audio/wav"}, BadRequest, "content_type"),
    ],
)
def test_bad_tasks(client: Any, body: Any, options: dict[str, Any], kind: type[TaskError], param: str | None) -> None:
    with pytest.raises(kind) as caught:
        client.request(body, queue="embed", **options)
    error = caught.value
    assert (error.param, error.status_code, error.reply.status) == (param, kind_code(kind), "rejected")
    assert error.message in str(error) and error.message


def kind_code(kind: type[TaskError]) -> int:
    return {BadRequest: 400, NotServed: 404}[kind]


def test_options_are_no_fields(client: Any) -> None:
    with pytest.raises(TypeError, match="with_options"):
        client.chat(CHAT, timeout=3)
    with pytest.raises(ValueError, match="sentinel"):
        client.request(b" null")


def test_rerank_score_classify(client: Any) -> None:
    rerank, classify = (client.with_options(queue=queue) for queue in ("rerank", "classify"))
    ranked = rerank.rerank("a query", WORDS, top_n=3)
    scores = rerank.score("a query", WORDS)
    best = sorted(range(len(WORDS)), key=lambda index: -scores[index])[:3]
    assert [one.index for one in ranked] == best
    assert [one.document for one in ranked] == [WORDS[index] for index in best]
    assert [one.score for one in ranked] == pytest.approx([scores[index] for index in best], abs=1e-6)

    found = classify.classify(TEXTS, rows_per_task=5)
    assert len(found) == len(TEXTS)
    for one in found:
        assert sum(one.probs) == pytest.approx(1, abs=1e-5) and len(one.probs) == 3
        assert one.label == ["negative", "neutral", "positive"][one.probs.index(max(one.probs))]
        assert one.score == max(one.probs) and one.labels == []
    [top] = classify.classify(["wax"], top_k=2)
    assert len(top.labels) == 2 and top.labels[0] == (top.label, pytest.approx(top.score))


def test_labels_of_the_request(client: Any) -> None:
    inference = client.with_options(queue="inference")
    labels = ["music", "the tide", "a queue"]
    found = inference.classify(TEXTS, labels=labels, rows_per_task=7)
    assert len(found) == len(TEXTS)
    for one in found:
        assert sorted(label.label for label in one) == sorted(labels)
        assert sum(label.score for label in one) == pytest.approx(1, abs=1e-5)
        assert [label.score for label in one] == sorted((label.score for label in one), reverse=True)
    [one] = inference.classify(["wax"], labels=labels, hypothesis_template="It is {}", multi_label=True, top_k=1)
    assert len(one) == 1
    assert inference.classify(["wax"])[0].label in ("contradiction", "neutral", "entailment")
    with pytest.raises(TypeError, match="labels is a list"):
        inference.classify(["wax"], labels="music")
    with pytest.raises(BadRequest, match="natural language inference"):
        client.with_options(queue="classify").classify(["wax"], labels=labels)


def test_sparse_vectors(client: Any) -> None:
    sparse = client.with_options(queue="sparse")
    found = sparse.embed_sparse(TEXTS, rows_per_task=5)
    assert len(found) == len(TEXTS) and all(vector and min(vector.values()) > 0 for vector in found)
    [best] = sparse.embed_sparse([TEXTS[0]], top_k=3)
    assert best == dict(sorted(sorted(found[0].items(), key=lambda pair: -pair[1])[:3]))
    with pytest.raises(BadRequest, match="threshold"):
        sparse.embed_sparse(["wax"], threshold=-1)


def test_token_labels(client: Any) -> None:
    labels = client.with_options(queue="token-labels")
    found = labels.token_labels(TEXTS, rows_per_task=5)
    assert len(found) == len(TEXTS) and any(found)
    for text, entities in zip(TEXTS, found):
        for one in entities:
            assert one.label in ("PER", "LOC") and 0 < one.score <= 1 and one.index is None
            assert 0 <= one.start < one.end <= len(text)
    [tokens] = labels.token_labels(["wax and wick"], aggregation_strategy="none", ignore_labels=[])
    assert [one.index for one in tokens] == list(range(1, len(tokens) + 1))
    with pytest.raises(BadRequest, match="stride is 62"):
        labels.token_labels(["wax"], stride=62)


@pytest.mark.parametrize(
    ("name", "label"), [("cat.jpg", "cat"), ("coffee.webp", "espresso"), ("rocket.png", "missile")]
)
def test_images(client: Any, name: str, label: str) -> None:
    images = client.with_options(queue="images")
    labels = images.classify_image((PHOTOS / name).read_bytes(), top_k=3)
    assert len(labels) == 3 and any(label in one.label for one in labels), labels
    assert labels == sorted(labels, key=lambda one: -one.score)
    assert images.classify_image(PHOTOS / name, top_k=3) == images.classify_image(str(PHOTOS / name), top_k=3) == labels


def test_texts_and_images(client: Any) -> None:
    both = client.with_options(queue="text-image")
    photos = [ROOT / "examples/images" / name for name in ("rocket.png", "cat.jpg")]
    images = both.embed_images([photos[0], photos[1].read_bytes()], rows_per_task=1)
    [text] = both.embed(["a rocket"])
    assert [len(vector) for vector in (*images, text)] == [24, 24, 24]
    assert both.embed_images(photos, as_array=True).shape == (2, 24)
    labels = both.classify_image(photos[0], labels=["cat", "rocket", "cup of coffee"])
    assert sorted(label.label for label in labels) == ["cat", "cup of coffee", "rocket"]
    assert sum(label.score for label in labels) == pytest.approx(1)
    other = both.classify_image(photos[0], labels=["cat", "rocket"], hypothesis_template="{}!", top_k=1)
    assert len(other) == 1
    with pytest.raises(BadRequest, match="labels is missing"):
        both.classify_image(photos[0])
    with pytest.raises(TypeError, match="list of images"):
        both.embed_images(photos[0])
    with pytest.raises(TypeError, match="labels is a list of texts, not str"):
        both.classify_image(photos[0], labels="cat")
    good, bad = photos[0], photos[1].read_bytes()[:300]
    mixed = both.embed_images([good, bad, good], errors="each")
    assert [isinstance(one, list) for one in mixed] == [True, False, True]
    mixed = both.embed_images([b"hello", good, "missing.png", bad, good], rows_per_task=4, errors="each")
    assert [isinstance(one, InputError) for one in mixed] == [True, False, True, True, False]
    assert "begins with b'hello'" in str(mixed[0]) and "missing.png" in str(mixed[2]) and mixed[3].index == 3
    with pytest.raises(TypeError, match="image is a path, bytes or a URL, not list"):
        both.classify_image([good], labels=["cat"])


def test_captions(client: Any) -> None:
    captions = client.with_options(queue="caption")
    photo = ROOT / "examples/images/rocket.png"
    assert captions.caption(photo, max_new_tokens=3) == "r r r"
    assert captions.caption(photo.read_bytes(), prompt="a photograph of", max_new_tokens=2) == "a photograph of r r"
    with pytest.raises(BadRequest, match="max_new_tokens"):
        captions.caption(photo, max_new_tokens=1_000)
    with pytest.raises(TypeError, match="prompt"):
        captions.caption(photo, promt="a")


def test_generated_images(client: Any) -> None:
    images = client.with_options(queue="image-generation")
    two = images.generate_images("a cat", n=2, size="64x48", steps=2, seed=7)
    assert [image[:8] for image in two] == [b"\x89PNG\r\n\x1a\n"] * 2
    assert [int.from_bytes(two[0][at : at + 4], "big") for at in (16, 20)] == [64, 48]
    assert images.generate_images("a cat", size="64x48", steps=2, seed=8) == two[1:]
    with pytest.raises(TooLarge, match="steps is 5000"):
        images.generate_images("a cat", steps=5_000)
    with pytest.raises(TypeError, match="response_format"):
        images.generate_images("a cat", response_format="png")


def test_speak(client: Any) -> None:
    speak = client.with_options(queue="speak")
    assert "heart" in speak.voices()
    with pytest.raises(TypeError, match="not PosixPath"):
        speak.speak(Path("hello.txt"))
    with pytest.raises(TypeError, match="input is the text"):
        speak.speak("a", input="b")
    sound = speak.speak("The train leaves at half past nine.", voice="heart", seed=1)
    assert sound.startswith(b"RIFF") and sound == speak.speak("The train leaves at half past nine.", seed=1)
    found = client.with_options(queue="speech").transcribe(sound)
    assert found.text.lower().strip(" .") == "the train leaves at half past nine"
    raw = speak.speak("Yes.", phonemes="jˈɛs.", response_format="pcm", seed=1)
    assert raw == speak.speak("", phonemes=["jˈɛs."], response_format="pcm", seed=1)
    assert speak.speak("Yes.", response_format="flac").startswith(b"fLaC")
    body = {"input": "One. Two. Three.", "response_format": "pcm", "seed": 2}
    reply = speak.request(body, url="/v1/audio/speech")
    assert reply.headers["sample_rate"] == 24_000 and reply.headers["audio_ms"] == len(reply.body) // 48
    voices = speak.request(b"{}", url="/v1/audio/voices").json()["voices"]
    assert voices == [{"id": "heart", "name": "Heart", "language": "en-US"}]
    with pytest.raises(BadRequest, match="voice is 'nobody'|the voices heart"):
        speak.speak("Yes.", voice="nobody")
    with pytest.raises(BadRequest, match="speed must be a number"):
        speak.speak("Yes.", speed=100)


def test_what_is_spoken_is_heard(client: Any) -> None:
    demo = runpy.run_path(str(ROOT / "examples/demo/speak"))
    words, distance = demo["words"], demo["distance"]
    speak, speech = (client.with_options(queue=queue) for queue in ("speak", "speech"))
    errors = total = 0
    for text in demo["SENTENCES"][::2]:
        heard = speech.transcribe(speak.speak(text, seed=3)).text
        errors += distance(words(text), words(heard))
        total += len(words(text))
    # The package's own voice has 7 % on such sentences.
    assert errors <= 0.1 * total, f"{errors} of {total} words were heard wrong"


def test_speech(client: Any) -> None:
    speech = client.with_options(queue="speech")
    path = ROOT / "models/recordings/librivox-0930.wav"
    found = speech.transcribe(path)
    assert found.text == "He might even have been made amiable himself." and found.language == "en"
    assert 3 < found.duration < 5 and found.segments[-1].end <= found.duration
    assert "".join(segment.text for segment in found.segments).strip() == found.text
    assert found.words == []
    timed = speech.transcribe(path, words=True)
    assert timed.text == found.text and " ".join(word.word for word in timed.words) == found.text
    assert all(0 <= word.start <= word.end <= found.duration for word in timed.words)
    assert speech.transcribe(path.as_uri(), words=True, temperature=0) == timed
    with pytest.raises(BadRequest, match="allowed_sources"):
        speech.transcribe("https://media.example.org/a.wav")
    assert found.recording_end is None
    # A header of 44 bytes that states neither its size nor a length.
    wav = bytearray(path.read_bytes())
    wav[4:8] = wav[40:44] = b"\xff\xff\xff\xff"
    streamed = speech.transcribe(bytes(wav))
    assert streamed.text == found.text and streamed.recording_end == "unmarked"
    left = numpy.frombuffer(wav[44:], dtype="<i2")
    wav[22:24], wav[32:34] = b"\2\0", b"\4\0"
    with pytest.warns(ReplyWarning, match="cancel each other"):
        opposite = speech.transcribe(bytes(wav[:44]) + numpy.stack([left, -left], 1).tobytes())
    assert opposite.text == ""
    sound = (ROOT / "tests/fixtures/sound/short.ogg").read_bytes()
    assert speech.transcribe(sound, temperature=0.00001, vad={"threshold": 0.3}).text
    with pytest.raises(BadRequest, match="vad.threshold must be a number"):
        speech.transcribe(sound, vad={"threshold": 7})
    with pytest.raises(NotServed):
        speech.transcribe(sound, translate=True)
    with pytest.raises(ValueError, match="no WAV, FLAC, Ogg or MP3: it begins with b'no sound'"):
        speech.transcribe(b"no sound")
    with pytest.raises(ValueError, match="it is empty"):
        speech.transcribe(b"")
    with pytest.raises(TypeError, match="no parameter 'langauge'; did you mean language"):
        speech.transcribe(sound, langauge="en")
    with pytest.raises(TypeError, match="there is request"):
        speech.transcribe(sound, response_format="srt")
    with pytest.raises(TypeError, match="response_format is no option of a task; .* into headers="):
        speech.request(b"RIFF", content_type="audio/wav", response_format="srt")


def test_texts_for_a_pool_of_images(client: Any) -> None:
    images = client.with_options(queue="images")
    with pytest.raises(NotServed, match="this pool classifies images"):
        images.classify(["wax"])
    with pytest.raises(FileNotFoundError, match="dog.jpg"):
        images.classify_image("dog.jpg")
    with pytest.raises(TypeError, match="no parameter 'lables'; did you mean labels"):
        images.classify_image(b"", lables=["cat"])
    with pytest.raises(BadRequest, match="labels of its own"):
        images.classify_image(ROOT / "tests/fixtures/images/rgb.png", labels=["cat"])
    with pytest.raises(BadRequest, match="top_k"):
        images.classify_image(ROOT / "tests/fixtures/images/rgb.png", top_k=2.5)
    with pytest.raises(TypeError, match="'as_aray'; did you mean as_array?"):
        client.embed(["wax"], as_aray=True)


def test_text_in_parts(client: Any) -> None:
    text = client.with_options(queue="text")
    whole = text.chat(CHAT, max_tokens=24, temperature=0)
    stream = text.stream_chat(CHAT, max_tokens=24, temperature=0)
    parts = list(stream)
    assert len(parts) > 2 and [part.seq for part in parts] == sorted(part.seq for part in parts)
    assert len({part.stream_id for part in parts}) == 1 and not any(part.restarted for part in parts)
    assert "".join(part.text for part in parts) == whole.text == stream.result().text != ""
    assert text.chat("Say hello.", max_tokens=24, temperature=0).text == whole.text
    assert whole.finish_reason in ("stop", "length") and whole.usage["completion_tokens"] > 2
    assert text.complete("The sun", max_tokens=5, seed=1).text == text_in_parts(text, "The sun", max_tokens=5, seed=1)


def text_in_parts(client: Any, prompt: str, **more: Any) -> str:
    return "".join(part.text for part in client.stream_complete(prompt, **more))


def test_the_openai_package_reads_the_bodies(client: Any) -> None:
    text = client.with_options(queue="text")
    embeddings = client.request({"input": ["a", "b"]}, queue="embed").json()
    assert len(CreateEmbeddingResponse.model_validate(embeddings, strict=True).data) == 2
    Completion.model_validate_json(text.complete("The", max_tokens=2).body, strict=True)
    ChatCompletion.model_validate_json(text.chat(CHAT, max_tokens=2).body, strict=True)
    for part in text.stream_chat(CHAT, max_tokens=4, stream_options={"include_usage": True}):
        ChatCompletionChunk.model_validate(part.chunk)


def test_a_reply_that_is_not_json(client: Any) -> None:
    sound = client.request({"reply": "data:audio/wav;base64,UklGRv8A"}, queue="echo")
    assert (sound.content, sound.content_type, sound.status_code) == (b"RIFF\xff\x00", "audio/wav", 200)
    text = client.request({"reply": "data:text/plain;base64,w7w="}, queue="echo")
    assert (text.content, text.text, text.content_type) == ("ü", "ü", "text/plain")
    with pytest.raises(BadReply, match="audio/wav"):
        sound.json()


@pytest.mark.parametrize(("content_type", "empty"), [("audio/pcm", b""), ("text/plain", "")])
def test_parts_that_are_not_json(client: Any, content_type: str, empty: Any) -> None:
    task = {"prompt": 1, "max_tokens": 12, "step_ms": 20, "content_type": content_type}
    stream = client.stream(task, queue="script")
    parts = list(stream)
    assert len(parts) > 1 and {part.content_type for part in parts} == {content_type}
    assert empty.join(part.content for part in parts) == stream.result().content != empty


LONG = {"prompt": 1, "max_tokens": 900, "step_ms": 20}


def test_breaking_off_cancels(client: Any, sconce: Sconce) -> None:
    for part in client.stream(LONG, queue="script"):
        if part.seq == 2:
            break
    sconce.cancels_one()


def test_a_cancelled_future_cancels(client: Any, sconce: Sconce) -> None:
    sconce.runs(0)
    future = client.submit(LONG, queue="script")
    sconce.runs(1)
    assert future.cancel()
    sconce.cancels_one()


def test_cancelling_by_correlation_id(client: Any, sconce: Sconce) -> None:
    sconce.runs(0)
    future = client.submit(LONG, queue="script", correlation_id="mine")
    sconce.runs(1)
    client.cancel("mine")
    with pytest.raises(Cancelled) as caught:
        future.result()
    assert caught.value.status_code == 499
    sconce.cancels_one()


def test_a_time_out_cancels(client: Any, sconce: Sconce) -> None:
    with pytest.raises(TaskTimeout, match="within 1 s"):
        # The worker's own deadline is later: it would end the task too.
        client.request(LONG, queue="script", timeout=1, expiration=60)
    sconce.cancels_one()


def test_without_a_control_exchange(connect: Callable[..., Any], sconce: Sconce) -> None:
    client = connect(control_exchange="nothing.of.this.name", queue="echo")
    with pytest.raises(TaskTimeout):
        client.request({"sleep_ms": 1500}, timeout=0.3)
    # The broker has closed the cancellation's channel, and not the other one.
    assert client.request({"after": 1}).json()["input"] == {"after": 1}


def submit_while_cut(client: Any, broker: Broker) -> list[Future[Reply]]:
    """Tasks of which some are on their way when the broker closes all connections, those of the workers too."""
    cutting = threading.Thread(target=broker.ctl, args=("close_all_connections", "cut by a test"))
    cutting.start()
    futures: list[Future[Reply]] = []
    while cutting.is_alive() or len(futures) < 100:
        futures.append(client.submit({"number": len(futures), "sleep_ms": 5}))
        until("there is room", lambda: sum(not future.done() for future in futures) < 30)
    return futures


def test_a_connection_that_is_cut(
    connect: Callable[..., Any], broker: Broker, sconce: Sconce, caplog: pytest.LogCaptureFixture
) -> None:
    futures = submit_while_cut(connect(queue="echo"), broker)
    assert [future.result(60).json()["input"]["number"] for future in futures] == list(range(len(futures)))
    assert "lost the broker" in caplog.text


def test_a_named_reply_queue_outlives_the_connection(
    connect: Callable[..., Any], broker: Broker, sconce: Sconce, caplog: pytest.LogCaptureFixture
) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        connection.channel().queue_declare("mine", durable=True)
    futures = submit_while_cut(connect(queue="echo", reply_queue="mine"), broker)
    assert [future.result(60).json()["input"]["number"] for future in futures] == list(range(len(futures)))
    assert "lost the broker" in caplog.text
    # Those of other tests are there: what they published before the cut went to a queue that was gone.
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        dead = connection.channel().consume("echo.dead", auto_ack=True, inactivity_timeout=0.5)
        for _, properties, _ in dead:
            if properties is None:
                break
            assert properties.reply_to != "mine"


def test_a_broker_that_is_away(
    connect: Callable[..., Any], broker: Broker, sconce: Sconce, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(queue="echo")
    broker.ctl("stop_app")
    try:
        future = client.submit({"number": 1})
        with pytest.raises(TaskTimeout, match="the broker is away"):
            client.request({"number": 2}, timeout=0.5)
        until("it tries again and again", lambda: caplog.text.count("lost the broker") > 2)
    finally:
        broker.ctl("start_app")
    assert future.result(60).json()["input"] == {"number": 1}


def test_heartbeats_go_on_while_a_task_takes_long(
    connect: Callable[..., Any], broker: Broker, sconce: Sconce, caplog: pytest.LogCaptureFixture
) -> None:
    # Without heartbeats the broker cuts the connection after three seconds.
    client = connect(f"{broker.url}?heartbeat=1", queue="echo")
    assert client.request({"sleep_ms": 4500}).json()["input"] == {"sleep_ms": 4500}
    assert "lost the broker" not in caplog.text


def test_there_are_models_for_all_pools() -> None:
    assert all(Path(model).exists() for model in POOLS.values() if isinstance(model, Path))
    assert AsyncClient.embed.__doc__ == Client.embed.__doc__
