"""What needs no broker."""

from __future__ import annotations

import base64
import pickle
import struct
import sys

import pytest

import sconce_client
from sconce_client import Expired, NoSuchQueue, Reply, TaskError, TaskTimeout, _reply, errors


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


def test_names() -> None:
    assert all(getattr(sconce_client, name) for name in sconce_client.__all__)
    assert issubclass(Expired, TimeoutError)
    with pytest.raises(AttributeError):
        sconce_client.nothing  # noqa: B018
