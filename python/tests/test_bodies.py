"""What needs no broker."""

from __future__ import annotations

import base64
import pickle
import struct
import sys
from typing import Callable

import pytest

import sconce_client
from sconce_client import BadReply, Expired, NoSuchQueue, Part, Reply, TaskError, TaskTimeout, _reply, errors


def test_vectors_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = base64.b64encode(struct.pack("<3f", 1.0, -0.5, 0.25)).decode()
    assert list(_reply.vector(raw)) == list(_reply.vector([1.0, -0.5, 0.25])) == [1.0, -0.5, 0.25]
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert _reply.vector(raw) == _reply.vector([1.0, -0.5, 0.25]) == [1.0, -0.5, 0.25]


@pytest.mark.parametrize("code", [400, 404, 408, 413, 499, 500, 507, 599])
@pytest.mark.parametrize(
    "body", [b'{"error": {"message": "no", "param": "input"}}', b"[]", b"\xff", b'{"error": "no"}']
)
def test_every_status_code_is_an_error(code: int, body: bytes) -> None:
    with pytest.raises(TaskError) as caught:
        _reply.reply(body, None, "c", {"status": "failed", "status_code": code})
    assert caught.value.status_code == code and type(caught.value) is errors.BY_STATUS_CODE.get(code, TaskError)
    assert isinstance(caught.value, TaskTimeout) == (code == 408)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.reply, copied.param) == (str(caught.value), caught.value.reply, caught.value.param)
    assert pickle.loads(pickle.dumps(NoSuchQueue("q"))).queue == "q"


def test_texts_of_all_kinds_of_bodies() -> None:
    for choice in ('{"text": "a"}', '{"message": {"content": "a"}}', '{"delta": {"content": "a"}}'):
        body = f'{{"choices": [{choice}]}}'.encode()
        assert Reply(body, "application/json", "c", "succeeded", 200, {}).text == "a"


def part(body: bytes, content_type: str | None) -> Part:
    made = _reply.Runs().part({"stream_id": "s", "seq": 0}, body, content_type)
    assert made is not None
    return made


def reply(body: bytes, content_type: str | None) -> Reply:
    return _reply.reply(body, content_type, "c", {"status": "succeeded", "status_code": 200})


@pytest.mark.parametrize("read", [part, reply])
def test_bodies_of_all_media_types(read: Callable[[bytes, str | None], Part | Reply]) -> None:
    for json in (None, "application/json", "Application/JSON; charset=utf-8", "application/problem+json"):
        it = read(b'{"object": "x"}', json)
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


def test_a_part_with_a_chunk_has_its_text() -> None:
    one = part(b'{"choices": [{"delta": {"content": "a"}}, {"text": "b"}]}', "application/json")
    assert (one.text, one.chunk["choices"][1]["text"], one.seq) == ("ab", "b", 0)


def test_names() -> None:
    assert all(getattr(sconce_client, name) for name in sconce_client.__all__)
    assert issubclass(Expired, TimeoutError)
    with pytest.raises(AttributeError):
        sconce_client.nothing  # noqa: B018
