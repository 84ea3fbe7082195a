"""The process of a model, as a worker of sconce speaks with it. The worker's own side is tested in Rust."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

from sconce_model._wire import encode

HERE = Path(__file__).resolve().parent
PATIENCE = 30.0


class Process:
    """One process, and the worker's ends of its two sockets."""

    def __init__(self, name: str, module: str | None = "classes", file: str | None = None, **start: Any) -> None:
        (self.model, own), (self.side, other) = socket.socketpair(), socket.socketpair()

        def place() -> None:
            # Out of the way first: the numbers may be those of the sockets.
            high = [os.dup2(one.fileno(), 100 + index) for index, one in enumerate((own, other))]
            for fd, at in zip(high, (3, 4)):
                os.dup2(fd, at, inheritable=True)

        paths = [str(HERE), *sys.path]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "sconce_model"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=place,  # noqa: PLW1509 - the tests have no threads
            pass_fds=(3, 4),
            text=True,
        )
        own.close()
        other.close()
        for one in (self.model, self.side):
            one.settimeout(PATIENCE)
        whole = {"version": 1, "mode": "serve", "device": "cpu", "device_name": "cpu", "dtype": "auto", "threads": 1}
        whole |= {"slot": "test/cpu-0", "slot_index": 0, "seed": 2**32 - 1, "model": f"python:classes:{name}"}
        whole |= {"model_name": name, "served_names": ["served"], "max_inputs": 5, "options": {}}
        self.send(self.model, type="start", **{**whole, "module": module, "file": file, "class": name, **start})

    def send(self, channel: socket.socket, *buffers: bytes, **header: Any) -> None:
        data = json.dumps({**header, "buffers": [len(it) for it in buffers]}).encode()
        channel.sendall(struct.pack("<I", len(data)) + data + b"".join(buffers))

    def receive(self, channel: socket.socket) -> dict[str, Any]:
        def exactly(size: int) -> bytes:
            data = b""
            while len(data) < size:
                more = channel.recv(size - len(data))
                assert more, f"the process has ended: {self.ended()}"
                data += more
            return data

        header: dict[str, Any] = json.loads(exactly(*struct.unpack("<I", exactly(4))))
        return {**header, "buffers": [exactly(size) for size in header.get("buffers", ())]}

    def answer(self, *buffers: bytes, **header: Any) -> dict[str, Any]:
        """What the side channel answers."""
        self.send(self.side, *buffers, **header)
        return self.receive(self.side)

    def forward(self, *inputs: list[int]) -> dict[str, Any]:
        self.send(self.model, type="forward", inputs=inputs)
        return self.receive(self.model)

    def prepare(self, number: int, body: Any, url: str = "/v1/embeddings", **more: Any) -> dict[str, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        header = {"content_type": "application/json", "headers": {}, "drop": [], **more}
        return self.answer(data, type="prepare", task=number, url=url, **header)

    def ready(self) -> dict[str, Any]:
        described = self.receive(self.model)
        assert described["type"] == "described", described
        ready = self.receive(self.model)
        assert ready["type"] == "ready", ready
        return described

    def ended(self) -> tuple[int, str]:
        """How it ends, and what it has printed."""
        assert self.process.stdout
        return self.process.wait(PATIENCE), self.process.stdout.read()


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    every: list[Process] = []

    def started(*arguments: Any, **more: Any) -> Process:
        every.append(Process(*arguments, **more))
        return every[-1]

    yield started
    for one in every:
        one.process.kill()
        one.process.wait()


def numbers(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def test_a_class_without_finish_gives_numbers_and_templates(start: Start) -> None:
    process = start("lengths")
    described = process.ready()
    assert described["urls"] == [{"url": "/v1/embeddings", "media_types": ["application/json"]}]
    assert (described["work"], described["gives_numbers"], described["has_preprocess"], described["concurrency"]) == ("batches", True, False, 1)

    prepared = process.prepare(7, {"input": ["one", "three"], "encoding_format": "base64", "model": "a/served"})
    assert (prepared["tokens"], prepared["bytes"], prepared["parts"]) == ([1, 2], [3, 5], False)
    assert prepared["form"] == "base64"
    reply = json.loads(b'"value"'.join(prepared["buffers"]))
    assert [it["embedding"] for it in reply["data"]] == ["value", "value"] and reply["model"] == "served"
    assert reply["usage"] == {"prompt_tokens": 3, "total_tokens": 3}

    assert process.prepare(9, {"input": "seventeen letters"})["form"] == "json"
    outputs = process.forward([7, 1, 1], [9, 0, 1], [7, 0, 1])
    assert (outputs["count"], outputs["lengths"], outputs["errors"]) == (3, [2, 2, 2], [])
    assert numbers(outputs["buffers"][0]) == [5.0, 0.5, 17.0, 0.5, 3.0, 0.5]


def test_dropped_tasks_are_gone(start: Start) -> None:
    process = start("lengths")
    process.ready()
    process.prepare(7, {"input": "one"})
    process.prepare(8, {"input": "two"}, drop=[7, 99])
    failed = process.forward([7, 0, 1])
    assert (failed["type"], failed["kind"]) == ("failed", "error") and "7" in failed["message"]
    assert process.forward([8, 0, 1])["count"] == 1


def test_a_class_with_finish_keeps_its_outputs(start: Start) -> None:
    process = start("Fussy", options={"name": "a", "factor": 3}, dtype="bf16")
    described = process.ready()
    assert described["gives_numbers"] is False and described["has_preprocess"] is True
    assert {"name": "factor", "type": "float", "value": 3} in described["options"]
    assert {"name": "name", "type": "str", "value": "a"} in described["options"]
    assert "form" not in process.prepare(1, {"input": ["ab", "c", "def"]})
    assert process.forward([1, 2, 1]) == {"type": "outputs", "count": 1, "errors": [], "buffers": []}
    early = process.answer(type="finish", task=1)
    assert (early["type"], early["kind"]) == ("refused", "error")
    process.forward([1, 0, 2])
    finished = process.answer(type="finish", task=1)
    assert finished["content_type"] == "application/json"
    seed = 2**32 - 1
    assert json.loads(finished["buffers"][0]) == {"found": ["cpu", "bfloat16", seed], "sums": [6.0, 3.0, 9.0], "tokens": 3}

    process.prepare(2, b"a bc", "/count", content_type="text/plain")
    process.forward([2, 0, 2])
    counted = process.answer(type="finish", task=2)
    assert (counted["content_type"], counted["buffers"]) == ("text/x-count", [b"9"])


def test_each_failure_of_a_batch_is_told_apart(start: Start) -> None:
    process = start("Fussy", options={"name": "a"})
    process.ready()
    half = process.prepare(3, b"\xed\xa0\x80", "/count", content_type="text/plain")
    assert half["message"].startswith("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xed")
    words = ["placed", "refused", "broken", "memory", "few"]
    process.prepare(1, {"input": words})
    process.prepare(4, b"giant", "/count", content_type="text/plain")
    process.forward([4, 0, 1])
    giant = process.answer(type="finish", task=4)
    assert (giant["type"], giant["kind"]) == ("refused", "error")
    assert giant["message"] == "ValueError: 1 buffers of 1073741825 bytes are more than the worker takes"
    placed = process.forward([1, 0, 1])
    assert placed["errors"] == [[0, {"kind": "task", "status": 409, "message": "in its place", "param": None}]]
    found = [process.forward([1, index, 1]) for index in range(1, 5)]
    assert found[0] == {
        "type": "failed", "kind": "task", "status": 422, "message": "no such word", "param": "input", "buffers": []
    }  # fmt: skip
    assert [(it["type"], it["kind"], it["message"]) for it in found[1:]] == [
        ("failed", "error", "KeyError: 'broken'"),
        ("failed", "out_of_memory", "MemoryError: too long"),
        ("failed", "error", "ValueError: forward returned 0 outputs for 1 inputs"),
    ]
    too_many = process.prepare(2, {"input": ["a"] * 6})
    assert (too_many["type"], too_many["status"]) == ("refused", 413)
    assert too_many["message"] == "the task has 6 inputs; this pool takes 5"
    process.model.close()
    code, printed = process.ended()
    assert code == 0 and 'raise KeyError("broken")' in printed and "no such word" not in printed


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ({"module": "nowhere.models"}, "operator", "there is no module nowhere.models: nowhere is not on the path of"),
        ({"name": "Absent"}, "operator", "classes has no Absent; its models: lengths, overlaps, Fussy, Teller, Deaf"),
        ({"name": "Task"}, "operator", "is no subclass of sconce_model.Model"),
        ({"name": "Fussy"}, "operator", "options.name is not set; Fussy needs it, of the type str"),
        ({"name": "Fussy", "options": {"name": "a", "mode": "x"}}, "operator", "of the type Literal['plain', 'loud']"),
        ({"version": 2}, "operator", "sconce speaks version 2 with a model in Python, and sconce_model 1"),
        ({"module": None, "file": "/nowhere/a.py"}, "operator", "there is no file /nowhere/a.py"),
    ],
)
def test_what_somebody_must_mend_is_said_before_anything_is_loaded(
    start: Start, how: dict[str, Any], kind: str, message: str
) -> None:
    process = start(**{"name": "lengths", **how})
    failed = process.receive(process.model)
    assert (failed["type"], failed["kind"]) == ("failed", kind) and message in failed["message"], failed
    assert process.ended()[0] == 1


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("import neighbour\nimport not_installed_here", "operator", "import: ModuleNotFoundError: No module named 'not_"),
        ("class Broken(:", "operator", "import: SyntaxError: "),
        ("1 / 0", "model", "import: ZeroDivisionError: division by zero"),
        ("None.nothing", "operator", "import: AttributeError: 'NoneType' object has no attribute 'nothing'"),
        ("len(5)", "operator", "import: TypeError: "),
        ("open('/nowhere/weights')", "operator", "import: FileNotFoundError: [Errno 2] No such file or directory"),
        ("raise FileNotFoundError('the network is down, and the file is not in the cache')", "model", "import: FileNotFoundError"),
        ("raise ConnectionError('the hub does not answer')", "model", "import: ConnectionError"),
        ("raise MemoryError()", "model", "import: MemoryError"),
        ("raise SystemExit(3)", "model", "import: SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_imported(start: Start, tmp_path: Path, source: str, kind: str, message: str) -> None:
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "broken.py").write_text(source)
    process = start("Broken", module=None, file=str(tmp_path / "broken.py"))
    failed = process.receive(process.model)
    assert failed["kind"] == kind and failed["message"].startswith(message), failed
    code, printed = process.ended()
    assert code == 1 and "broken.py" in printed


def test_an_exception_of_load_may_pass_by_itself(start: Start) -> None:
    process = start("Fussy", options={"name": "a", "mode": "loud"})
    assert process.receive(process.model)["type"] == "described"
    failed = process.receive(process.model)
    assert failed["kind"] == "model" and failed["message"].startswith("load: RuntimeError: it is too loud (")
    assert "classes.py:" in failed["message"]


def test_a_class_is_described_without_being_loaded(start: Start) -> None:
    process = start("Fussy", mode="describe", options={"name": "a", "mode": "loud"})
    assert process.receive(process.model)["type"] == "described"
    assert process.ended() == (0, "")


def test_a_probe_is_a_task_for_the_first_url(start: Start) -> None:
    process = start("Fussy", options={"name": "a"})
    process.receive(process.model)
    ready = process.receive(process.model)
    assert ready["probe"] == {"url": "/v1/embeddings", "content_type": "application/json"}
    assert json.loads(ready["buffers"][0]) == {"input": "fine"}


def test_streams_run_side_by_side_and_end_once(start: Start) -> None:
    process = start("Teller", options={"concurrency": 3})
    described = process.ready()
    assert (described["work"], described["concurrency"], described["gives_numbers"]) == ("streams", 3, False)
    for number, body in enumerate([{"count": 3, "stream": True}, {"count": 2}, {"count": 3, "way": "fail"}]):
        prepared = process.prepare(number, body, "/tell")
        assert (prepared["type"], prepared["parts"], len(prepared["tokens"])) == ("prepared", number == 0, 1)
        process.send(process.model, type="stream", task=number)
    ends: dict[int, dict[str, Any]] = {}
    parts: list[tuple[int, bytes]] = []
    while len(ends) < 3:
        frame = process.receive(process.model)
        if frame["type"] == "part":
            parts.append((frame["task"], frame["buffers"][0]))
        else:
            assert ends.setdefault(frame["task"], frame) is frame
    assert [data for task, data in parts if task == 0] == [b"0 ", b"1 ", b"2 "]
    assert (ends[0]["type"], ends[0]["content_type"], ends[0]["buffers"]) == ("done", "text/plain; charset=utf-8", [b"0 1 2 "])
    assert ends[1]["buffers"] == [b"0 1 "]
    assert (ends[2]["type"], ends[2]["kind"], ends[2]["message"]) == ("ended", "error", "ValueError: one is too many")
    assert parts.index((1, b"0 ")) < parts.index((0, b"2 "))


@pytest.mark.parametrize("way", ["sleep", "eager", "blocked"])
def test_a_cancelled_stream_is_told_at_its_next_await_or_yield(start: Start, way: str) -> None:
    process = start("Teller")
    process.ready()
    process.prepare(1, {"count": 10**9, "way": way}, "/tell")
    process.send(process.model, type="stream", task=1)
    assert process.receive(process.model)["type"] == "part"
    process.send(process.model, type="cancel", task=1, reason="deadline")
    process.send(process.model, type="cancel", task=99, reason="cancelled")
    while (frame := process.receive(process.model))["type"] == "part":
        pass
    assert (frame["type"], frame["kind"], frame["status"]) == ("ended", "task", 499)
    process.prepare(2, {"count": 1, "way": way}, "/tell", drop=[1])
    process.send(process.model, type="stream", task=2)
    assert [process.receive(process.model)["type"] for _ in range(2)] == ["part", "done"]
    process.model.close()
    assert process.ended() == (0, "told of deadline\n")


def test_a_stream_that_is_cancelled_before_its_first_step_ends_once(start: Start) -> None:
    process = start("Teller")
    process.ready()
    process.prepare(1, {"count": 3}, "/tell")
    process.prepare(2, {"count": 1}, "/tell")
    heads = [{"type": "stream", "task": 1}, {"type": "cancel", "task": 1, "reason": "cancelled"}, {"type": "stream", "task": 2}]
    written = [json.dumps(head).encode() for head in heads]
    process.model.sendall(b"".join(struct.pack("<I", len(head)) + head for head in written))
    frames = [process.receive(process.model) for _ in range(3)]
    [ended] = [frame for frame in frames if frame["task"] == 1]
    assert (ended["type"], ended["status"]) == ("ended", 499)
    assert [frame["type"] for frame in frames if frame["task"] == 2] == ["part", "done"]


def test_it_ends_with_the_worker_on_either_channel(start: Start) -> None:
    for channel in ("model", "side"):
        process = start("lengths")
        process.ready()
        getattr(process, channel).close()
        assert process.ended()[0] == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<I", 0), "a frame of the worker has a header of 0 bytes"),
        (struct.pack("<I", 1 << 31), "a frame of the worker has a header of 2147483648 bytes"),
        (struct.pack("<I", 2) + b"[]", "a frame of the worker cannot be read"),
        (struct.pack("<I", 26) + b'{"buffers": [2000000000]}  ', "a frame of the worker has 1 buffers of 2000000000 bytes"),
        (struct.pack("<I", 16) + b'{"type":"other"}', "the worker sent 'other'"),
    ],
)
def test_frames_outside_the_bounds_end_the_process(start: Start, data: bytes, message: str) -> None:
    for channel in ("model", "side"):
        process = start("lengths")
        process.ready()
        getattr(process, channel).sendall(data)
        code, printed = process.ended()
        assert code == 1 and message in printed


def test_a_class_that_ends_the_process_ends_it(start: Start) -> None:
    process = start("Deaf")
    process.ready()
    process.prepare(1, {"input": "a"})
    process.send(process.model, type="forward", inputs=[[1, 0, 1]])
    assert process.process.wait(PATIENCE) == 7


def test_without_a_worker_it_says_what_to_do() -> None:
    done = subprocess.run([sys.executable, "-m", "sconce_model"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "sconce_model.testing.run" in done.stderr


def test_half_a_surrogate_pair_in_an_error_does_not_spoil_its_frame() -> None:
    frame = encode("refused", task=7, message="no voice \ud83d")
    assert json.loads(frame[4:]) == {"type": "refused", "task": 7, "message": "no voice ?", "buffers": []}
