"""What needs no broker."""

from __future__ import annotations

import ast
import base64
import json
import pickle
import re
import struct
import sys
from graphlib import TopologicalSorter
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any, Callable

import numpy
import pika
import pytest
from conftest import ROOT
from packaging.version import Version

import sconce_client
from sconce_client import (
    BadReply,
    BadRequest,
    Expired,
    InputError,
    NoSuchQueue,
    Part,
    Reply,
    TaskError,
    TaskTimeout,
    _broker,
    _task,
    _wire,
    errors,
)

RAW = base64.b64encode(struct.pack("<3f", 1.0, -0.5, 0.25)).decode()


def test_vectors_need_no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _wire.matrix([RAW, RAW]).tolist() == [[1.0, -0.5, 0.25]] * 2
    assert (_wire.matrix([]).shape, _wire.matrix([RAW]).dtype) == ((0, 0), numpy.dtype("float32"))
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert _wire.vector(RAW) == [1.0, -0.5, 0.25]


def test_what_is_no_text_is_refused_before_it_is_published() -> None:
    wrong: list[tuple[Any, str]] = [
        ([1, 2], r"texts\[0\] is no text, but int; for token ids there is embed_tokens"),
        (["a", b"b"], r"texts\[1\] is no text, but bytes"),
        ("a", "texts is a list"),
    ]
    for texts, message in wrong:
        with pytest.raises(TypeError, match=message):
            list(_task.text_packs(texts, 8))
    for inputs in ([1, 2], ["a"], [[1, "a"]], [[1.0]]):
        with pytest.raises(TypeError, match=r"inputs\[0\]"):
            list(_task.token_packs(inputs, 8))  # type: ignore[arg-type]
    mixed: list[Any] = [[1, 2], (3,), numpy.array([4])]
    assert list(_task.token_packs(mixed, 2)) == [[[1, 2], [3]], [[4]]]


PNG = b"\x89PNG\r\n\x1a\n"


def test_what_is_no_image_is_refused_before_it_is_published(tmp_path: Path) -> None:
    text, missing = tmp_path / "a.txt", tmp_path / "missing.png"
    text.write_bytes(b"hello")
    wrong: list[tuple[Any, type[Exception], str]] = [
        (b"hello", ValueError, r"images\[1\] is no JPEG, PNG or WebP: it begins with b'hello'"),
        (b"", ValueError, r"images\[1\] is no JPEG, PNG or WebP: it is empty"),
        (text, ValueError, "/a.txt is no JPEG"),
        (str(missing), FileNotFoundError, "/missing.png"),
    ]
    for image, kind, message in wrong:
        with pytest.raises(kind, match=message):
            list(_task.image_packs([PNG, image], 8, False))
        [[good, bad]] = _task.image_packs([PNG, image], 8, True)
        assert isinstance(bad, InputError) and not isinstance(good, InputError)
        assert (bad.index, bad.param, bad.code) == (1, "input[1]", "invalid_value") and re.search(message, str(bad))
    for each in (False, True):
        with pytest.raises(TypeError, match=r"images\[0\] is a path, bytes or a URL, not int"):
            list(_task.image_packs([7], 8, each))  # type: ignore[list-item]


def test_one_file_is_named_in_its_error(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"hello")
    client = _task.Defaults()
    client._queue, client._timeout = "q", 1.0

    def transcribe(client: Any, sound: Any, content_type: None, more: Any) -> Any:
        return _task.transcribe(client, sound, content_type, False, False, more)

    methods: list[tuple[Callable[..., Any], str]] = [
        (_task.classify_image, "image"),
        (_task.caption, "image"),
        (transcribe, "sound"),
    ]
    for method, argument in methods:
        with pytest.raises(TypeError, match=f"^{argument} is a path, bytes or a URL, not list"):
            method(client, [text], None, {})
        with pytest.raises(ValueError, match=f"^{argument} is no .* it begins with b'hello'"):
            method(client, b"hello", None, {})
        with pytest.raises(ValueError, match="/a.txt is no .* it begins with b'hello'"):
            method(client, text, None, {})


def test_errors_keep_their_places_beside_inputs_that_are_not_sent() -> None:
    client = _task.Defaults()
    client._queue, client._timeout = "q", 1.0
    images = [PNG, b"bad", PNG, PNG, PNG, b"bad", b"bad", PNG]
    call = _task.embed(client, _task.image_packs(images, 3, True), False, {"errors": "each"})
    tasks = [json.loads(task.body) for task in call.tasks]
    assert [len(task["input"]) for task in tasks] == [1, 1, 2, 1]

    refused = Reply(b'{"error": {"message": "input[0] no", "param": "input[0]"}}', "", "c", "rejected", 400, {})
    vectors = [{"index": index, "embedding": RAW} for index in range(2)]
    vectors[1] = {"index": 1, "error": {"message": "input[1] no", "param": "input[1]", "code": "c"}}
    one, two = (json.dumps({"data": data}).encode() for data in (vectors[:1], vectors))
    answers: list[Reply | TaskError] = [reply(body, None) for body in (one, one, two, one)]
    answers[1] = call.failed(1, BadRequest(refused))
    found = call.result(answers)
    places = [one.index if isinstance(one, InputError) else None for one in found]
    assert places == [None, 1, 2, None, 4, 5, 6, None]
    assert (str(found[2]), str(found[4]), found[6].param) == ("input[2] no", "input[4] no", "input[6]")


def test_headers_are_pythons_own_integers() -> None:
    headers = {"status": "succeeded", "status_code": 200, "queue_us": pika.compat.long(7), "flag": True}
    assert repr(_wire.reply(b"{}", None, "c", headers).headers["queue_us"]) == "7"
    assert _wire.reply(b"{}", None, "c", headers).headers["flag"] is True


def test_an_index_counts_from_the_callers_first_input() -> None:
    body = b'{"error": {"message": "input[4] must be a text, got \\"input[4]\\"", "param": "input[4]"}}'
    with pytest.raises(BadRequest) as caught:
        _wire.reply(body, None, "c", {"status": "rejected", "status_code": 400})
    moved = pickle.loads(pickle.dumps(caught.value.moved(64)))
    assert (moved.index, moved.param, type(moved)) == (68, "input[68]", BadRequest)
    assert str(moved) == '400 rejected: input[68] must be a text, got "input[4]"'
    one = pickle.loads(pickle.dumps(InputError(3, "no", "input[3]", "invalid_value")))
    assert (str(one), one.index, one.param, one.code) == ("no", 3, "input[3]", "invalid_value")


def test_addresses_come_from_the_call_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _broker.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert _broker.urls(None) == [_broker.LOCAL]
    monkeypatch.setenv("AMQP_URL", "amqp://a")
    assert _broker.urls(None) == ["amqp://a"]
    monkeypatch.setenv("SCONCE_BROKER__URL", '["amqp://b", "amqps://c"]')
    assert _broker.urls(None) == ["amqp://b", "amqps://c"]
    assert _broker.urls("amqp://d, amqp://e") == ["amqp://d", "amqp://e"]
    with pytest.raises(ValueError, match=r"no address of a broker: 'http://user:\*\*\*@host/'"):
        _broker.urls("http://user:sec/ret@host/")


def test_modules_import_each_other_in_one_direction() -> None:
    folder = Path(_broker.__file__).parent
    graph: dict[str, set[str]] = {}
    for file in folder.glob("*.py"):
        relative = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom))
        names = ((node.module, [alias.name for alias in node.names]) for node in relative if node.level == 1)
        graph[file.stem] = {name for module, all_names in names for name in ([module] if module else all_names)}
    assert graph["errors"] >= {"_reply"} and graph["_reply"] == {"_base"}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_package_tells_its_version_and_where_it_comes_from() -> None:
    assert Version(sconce_client.__version__) == Version(version("sconce-client"))
    assert f'\nversion = "{sconce_client.__version__}"\n' in (ROOT / "Cargo.toml").read_text()
    told = metadata("sconce-client")
    assert told["Author"] and told["License-Expression"] == "MIT OR Apache-2.0"


@pytest.mark.parametrize("code", [400, 404, 408, 413, 499, 500, 507, 599])
@pytest.mark.parametrize(
    "body", [b'{"error": {"message": "no", "param": "input"}}', b"[]", b"\xff", b'{"error": "no"}']
)
def test_every_status_code_is_an_error(code: int, body: bytes) -> None:
    with pytest.raises(TaskError) as caught:
        _wire.reply(body, None, "c", {"status": "failed", "status_code": code})
    assert caught.value.status_code == code and type(caught.value) is errors.BY_STATUS_CODE.get(code, TaskError)
    assert isinstance(caught.value, TaskTimeout) == (code == 408)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.reply, copied.param) == (str(caught.value), caught.value.reply, caught.value.param)
    assert pickle.loads(pickle.dumps(NoSuchQueue("q"))).queue == "q"


def test_texts_of_all_kinds_of_bodies() -> None:
    for choice in ('{"text": "a"}', '{"message": {"content": "a"}}', '{"delta": {"content": "a"}}'):
        body = f'{{"choices": [{choice}]}}'.encode()
        assert Reply(body, "application/json", "c", "succeeded", 200, {}).text == "a"
    for body in (b'{"object": "list"}', b'{"choices": []}', b"[]"):
        vectors = Reply(body, "application/json", "c", "succeeded", 200, {})
        for name in ("text", "finish_reason"):
            with pytest.raises(BadReply, match="choices"):
                getattr(vectors, name)


def part(body: bytes, content_type: str | None) -> Part:
    made = _wire.Runs().part({"stream_id": "s", "seq": 0}, body, content_type)
    assert made is not None
    return made


def reply(body: bytes, content_type: str | None) -> Reply:
    return _wire.reply(body, content_type, "c", {"status": "succeeded", "status_code": 200})


@pytest.mark.parametrize("read", [part, reply])
def test_bodies_of_all_media_types(read: Callable[[bytes, str | None], Part | Reply]) -> None:
    for media in (None, "application/json", "Application/JSON; charset=utf-8", "application/problem+json"):
        it = read(b'{"object": "x"}', media)
        assert it.content == it.json() == {"object": "x"} and it.body == b'{"object": "x"}'
    for text, body in (
        ("text/plain", "ü".encode()),
        ('Text/VTT; charset="utf-8"', "ü".encode()),
        ("text/plain; charset=latin1", b"\xfc"),
    ):
        it = read(body, text)
        assert (it.content, it.text, it.body, it.content_type) == ("ü", "ü", body, text)
    sound = read(b"RIFF\xff\x00", "audio/wav")
    assert (sound.content, sound.body, sound.media_type) == (b"RIFF\xff\x00", b"RIFF\xff\x00", "audio/wav")
    for wrong in (lambda: sound.json(), lambda: sound.text, lambda: read(b"\xff", "text/plain").content):
        with pytest.raises(BadReply, match="audio/wav|text/plain"):
            wrong()


def test_transcriptions_have_their_text() -> None:
    assert reply(b'{"text": "a", "usage": {}}', "application/json").text == "a"
    assert part(b'{"type": "transcript.text.delta", "delta": "a"}', "application/json").text == "a"


def test_a_part_with_a_chunk_has_its_text() -> None:
    one = part(b'{"choices": [{"delta": {"content": "a"}}, {"text": "b"}]}', "application/json")
    assert (one.text, one.chunk["choices"][1]["text"], one.seq) == ("ab", "b", 0)


def test_names() -> None:
    assert all(getattr(sconce_client, name) for name in sconce_client.__all__)
    assert issubclass(Expired, TimeoutError)
    with pytest.raises(AttributeError):
        sconce_client.nothing  # noqa: B018
