"""`sconce_model`, as who writes a class uses it."""

from __future__ import annotations

import base64
import math
import struct
from array import array
from collections import deque
from typing import Any, Callable, Optional

import classes
import numpy as np
import pytest

import sconce_model
from sconce_model import ClassProblem, Input, Model, Task, TaskError, testing


def test_a_function_answers_embeddings_in_the_order_of_its_texts() -> None:
    [one, many] = testing.run(classes.lengths, [b'{"input": "\\ud83d\\ude00 is"}', {"input": ["a", "", "three" * 4]}], batch=2)
    assert one.json()["data"] == [{"object": "embedding", "index": 0, "embedding": [4.0, 0.5]}]
    assert [it["embedding"] for it in many.json()["data"]] == [[1.0, 0.5], [0.0, 0.5], [20.0, 0.5]]
    assert many.json()["usage"] == {"prompt_tokens": 7, "total_tokens": 7} and many.json()["model"] == "model"
    assert classes.lengths(["it stays a function"]) == [[19, 0.5]]


def test_vectors_as_base64() -> None:
    [reply] = testing.run(classes.lengths, [{"input": "four", "encoding_format": "base64"}])
    data = base64.b64decode(reply.json()["data"][0]["embedding"])
    assert struct.unpack("<2f", data) == (4.0, 0.5)


def test_numbers_answer_scores() -> None:
    [reply, refused] = testing.run(
        classes.overlaps, [{"text_1": "ab", "text_2": ["ab", "bc"]}, {"text_1": ["a", "b"], "text_2": ["c"]}]
    )
    assert [it["score"] for it in reply.json()["data"]] == pytest.approx([1.0, 1 / 3])
    assert reply.json()["data"][1]["object"] == "score"
    assert (refused.status_code, str(refused.error)) == (400, "text_1 has 2 texts and text_2 has 1")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the body is not JSON: "),
        (b"[" * 100_000, 400, "the body is not JSON: "),
        (b'{"input": "a", "top": NaN}', 400, "the body is not JSON: NaN is no JSON"),
        (b'{"input": "\\ud83d"}', 400, "the body is not JSON: 'utf-8' codec can't encode character"),
        (["input"], 400, "the body must be a JSON object"),
        ({}, 400, "the field 'input' is missing"),
        ({"input": []}, 400, "input must be a text or a list of texts"),
        ({"input": ["a", 5]}, 400, "input[1] must be a text"),
        ({"input": "a", "dimensions": 5}, 400, "dimensions is 5, and this model has no dimensions"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format is 'hex'"),
        ({"input": "a", "model": "org/other"}, 404, "model is 'org/other'; this pool serves model"),
        ({"input": ["a"] * 2049}, 413, "the task has 2049 inputs; this pool takes 2048"),
    ],
)
def test_a_bad_body_is_refused_and_others_are_answered(body: Any, status: int, message: str) -> None:
    [bad, good] = testing.run(classes.lengths, [body, {"input": "a", "model": "org/model", "dimensions": None}])
    assert bad.status_code == status and isinstance(bad.error, TaskError) and str(bad.error).startswith(message)
    assert good.status_code == 200 and len(good.json()["data"]) == 1


def test_one_input_at_fault_fails_its_task_alone() -> None:
    words = ["fine", "refused", "broken", "placed", "few", "last"]
    replies = testing.run(classes.Fussy, [{"input": word} for word in words], options={"name": "a"})
    assert [it.status_code for it in replies] == [200, 400, 500, 400, 500, 200]
    assert replies[0].json() == {"found": ["cpu", "float32", 0], "sums": [8.0], "tokens": 1}
    with pytest.raises(KeyError, match="broken"):
        replies[2].json()
    with pytest.raises(ValueError, match="forward returned 0 outputs for 1 inputs"):
        replies[4].json()


def test_bytes_of_another_media_type_and_a_body_of_ones_own() -> None:
    task = Task(b"two words", "/count", "text/plain")
    [reply] = testing.run(classes.Fussy, [task], options={"name": "a", "factor": 10})
    assert reply.body == sconce_model.Body(b"80", "text/x-count") and task.tokens == 8


def test_streams_are_joined_if_their_parts_are_texts() -> None:
    [told, failed] = testing.run(classes.Teller, [{"count": 3}, {"count": 3, "way": "fail"}])
    assert told.body and told.body.data == b"0 1 2 " and [it.data for it in told.parts] == [b"0 ", b"1 ", b"2 "]
    assert failed.status_code == 500 and len(failed.parts) == 1


def of(**attributes: Any) -> Any:
    """A class with these attributes, beside what it needs."""
    whole = {"urls": ["/v1/embeddings"], "forward": lambda self, batch: batch, **attributes}
    return type("Wrong", (Model,), {name: value for name, value in whole.items() if value is not None})


async def no_yield(self: Any, task: Any) -> None: ...


def options(**types: Any) -> type:
    own = {name: value[1] for name, value in types.items() if isinstance(value, tuple)}
    annotations = {name: value[0] if isinstance(value, tuple) else value for name, value in types.items()}
    return type("Options", (), {**own, "__annotations__": annotations})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: dict, "<class 'dict'> is no subclass of sconce_model.Model"),
        (lambda: of(urls="/v1/embeddings"), "Wrong.urls is '/v1/embeddings'; it must be a list of paths"),
        (lambda: of(media_types="image/png"), "Wrong.media_types has 'image/png'; it must be a list such as"),
        (lambda: of(media_types={"/x": ["a/b"]}), "Wrong.media_types has '/x', which is not in Wrong.urls"),
        (lambda: of(media_types=["*/json"]), "Wrong.media_types has ['*/json']; it must be a list such as"),
        (lambda: of(media_types=["image/p*"]), "Wrong.media_types has ['image/p*']"),
        (lambda: of(probe=5, load=lambda self: 0), "(self) must be load(self, device, dtype, options): too many positional"),
        (lambda: of(probe=5, load=lambda self: 0), "; Wrong.probe must be a method: probe(self)"),
        (lambda: of(forwards=1), "Wrong.forwards is unknown: did you mean forward?"),
        (lambda: of(url=["/x"]), "Wrong.url is unknown: did you mean urls?"),
        (lambda: of(forward=None), "must have either forward(self, batch) or stream(self, task); it has neither"),
        (lambda: of(forward=lambda self: 0), "must be forward(self, batch): too many positional arguments"),
        (lambda: of(load=lambda self, device: 0), "Wrong.load(self, device) must be load(self, device, dtype, options)"),
        (lambda: of(probe=5), "Wrong.probe must be a method: probe(self)"),
        (lambda: of(forward=None, stream=no_yield), "Wrong.stream must be `async def`, with `yield`"),
        (lambda: of(forward=no_yield), "Wrong.forward must be `def`, not `async def`"),
        (lambda: of(urls=["/classify"]), "answers /classify, and so needs finish(self, task, outputs): only /v1/embeddings"),
        (lambda: of(Options=options(a=(int, "3"))), "Options.a is '3' by default; its type is int"),
        (lambda: of(Options=options(a=(float, math.inf))), "Options.a is inf by default"),
        (lambda: of(Options=options(a=dict[str, int])), "the type of Options.a is dict[str, int]; options have the types"),
        (lambda: of(__init__=lambda self, name: None), "Wrong.__init__ must need no arguments"),
        (lambda: of(Options=options(a="Nowhere")), "the types of Options cannot be read: name 'Nowhere' is not defined"),
    ],
)
def test_a_wrong_class_is_refused_with_the_attributes_name(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(ClassProblem) as raised:
        sconce_model.load(wrong())
    assert message in str(raised.value)


def test_options_are_checked_and_completed() -> None:
    class Served(Model):
        urls = ("/v1/embeddings",)

        class Options:
            weights: Optional[str] = None  # noqa: UP045 - Python 3.9 reads it
            top = 5
            ratio: float = 1

        def load(self, device: str, dtype: str, options: Any) -> None:
            self.options = options

        def forward(self, batch: list[Input]) -> Any:
            return [[1.0]] * len(batch)

    model: Any = sconce_model.load(Served, options={"top": 6, "ratio": 2, "weights": "a.pt"})
    assert vars(model.options) == {"weights": "a.pt", "top": 6, "ratio": 2} and isinstance(model.options, Served.Options)
    for given, message in (
        ({"top": "6"}, "options.top is '6'; it must be of the type int"),
        ({"top": True}, "options.top is True; it must be of the type int"),
        ({"tops": 6}, "options.tops is no option of Served; it has weights, top, ratio"),
        (
            {"tops": 6, "ratio": None},
            "options.tops is no option of Served; it has weights, top, ratio; options.ratio is None; it must be of the type float",
        ),
    ):
        with pytest.raises(ClassProblem) as raised:
            sconce_model.load(Served, options=given)
        assert str(raised.value) == message
    with pytest.raises(ClassProblem, match="options.name is not set; Fussy needs it, of the type str"):
        sconce_model.load(classes.Fussy)


def test_a_class_that_takes_every_media_type_gets_json_by_default() -> None:
    def preprocess(self: Any, task: Task) -> list[Input]:
        return [Input(task.content_type)]

    types: Any = {"media_types": ["*/*"], "finish": lambda self, task, outputs: str(outputs[0])}
    [one] = testing.run(of(preprocess=preprocess, forward=lambda self, batch: [it.value for it in batch], **types), [{}])
    assert one.body and one.body.data == b"application/json"


def test_an_error_of_a_task_has_a_status_of_the_requester() -> None:
    with pytest.raises(ValueError, match="from 400 to 499, not 500; for a fault, raise another exception"):
        TaskError(500, "no")


def answered(forward: Callable[..., Any], count: int = 2, **attributes: Any) -> list[testing.Reply]:
    return testing.run(of(forward=forward, **attributes), [{"input": "a"}] * count)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({1: [0.0], 2: [1.0]}, "forward returned dict; it must be a list"),
        ("ab", "forward returned str; it must be a list"),
        ([{7: 0.5}, {8: 0.5}], "forward returned dict for an input; without `finish` the output of an input is a vector"),
        ([bytearray(b"a")] * 2, "forward returned bytearray for an input"),
    ],
)
def test_what_is_no_vector_is_an_error_and_no_reply(outputs: Any, message: str) -> None:
    for reply in answered(lambda self, batch: outputs if len(batch) == 2 else type(outputs)(list(outputs)[:1])):
        assert reply.status_code == 500, reply
    with pytest.raises(TypeError, match=message):
        sconce_model._bodies.vectors(sconce_model._class.call_forward(sconce_model.load(of(forward=lambda self, batch: outputs)), [Input(1), Input(2)]))


def test_an_error_in_any_list_refuses_its_input() -> None:
    replies = answered(lambda self, batch: deque([TaskError(422, "no"), [1.0]][: len(batch)]))
    assert [reply.status_code for reply in replies] == [400, 200]


def test_the_bytes_of_an_array_are_a_body() -> None:
    pcm: Any = array("h", [258, 772])
    [reply] = answered(
        lambda self, batch: batch, 1, finish=lambda self, task, outputs: sconce_model.Body(pcm, "audio/pcm")
    )
    assert reply.body and reply.body.data == pcm.tobytes()
    with pytest.raises(TypeError, match="the content type of a Body is None"):
        sconce_model.Body(b"", None)  # type: ignore[arg-type]


def test_a_body_in_another_encoding_and_half_a_pair_are_refused() -> None:
    for body in (b'{"input": "a \xed\xa0\xbd b"}', '{"input": "a"}'.encode("utf-16"), b'{"input": "\xff"}'):
        [reply] = testing.run(classes.lengths, [body])
        assert reply.status_code == 400, body
    [reply] = testing.run(classes.lengths, [b'\xef\xbb\xbf{"input": "a"}'])
    assert reply.status_code == 200


def test_a_content_type_may_have_parameters_and_capitals() -> None:
    body = b'{"input": "four", "encoding_format": "base64"}'
    for content_type in ("application/json; charset=utf-8", "Application/JSON"):
        [reply] = testing.run(classes.lengths, [Task(body, "/v1/embeddings", content_type)])
        assert isinstance(reply.json()["data"][0]["embedding"], str)


def test_an_error_says_what_it_was_told_however_it_was_made() -> None:
    class Own(TaskError):
        def __init__(self) -> None:
            Exception.__init__(self, "own words")

    failures = [sconce_model._errors.failure_of(error) for error in (Own(), TaskError(422, "x", ("input", 0)))]  # type: ignore[arg-type]
    assert [(it["status"], it["message"], it["param"]) for it in failures] == [(400, "own words", None), (422, "x", "input.0")]
    noted = ValueError("the reason")
    noted.__notes__ = ["see the page"]
    assert sconce_model._errors.last_line(noted) == "ValueError: the reason"


def test_an_input_of_an_impossible_size_fails_its_task_alone() -> None:
    replies = answered(lambda self, batch: [[1.0]] * len(batch), 1, preprocess=lambda self, task: [Input("a", tokens=10**30)])
    assert replies[0].status_code == 500 and "tokens" in str(replies[0].error)


def test_a_probe_that_fails_is_an_error_of_the_test() -> None:
    with pytest.raises(TaskError, match="the field 'input' is missing"):
        answered(lambda self, batch: [[1.0]] * len(batch), probe=lambda self: {})
    with pytest.raises(TypeError, match="tasks is a dict"):
        testing.run(classes.lengths, {"input": "a"})


def test_arrays_are_vectors_of_real_numbers_or_errors() -> None:
    vectors = sconce_model._bodies.vectors
    for good in (np.ones((2, 3)), np.matrix([[1, 1, 1], [1, 1, 1]]), [np.ones(3, "f2"), np.ones(3, "i8")]):
        lengths, numbers = vectors(good)
        assert lengths == [3, 3] and numbers == struct.pack("<6f", *[1.0] * 6)
    for bad in (np.ones((2, 3, 4)), [np.ones((3, 4))], np.ones((2, 3), "c8"), [np.ma.array([1.0], mask=[True])], np.array([["1"]])):
        with pytest.raises(TypeError, match="forward returned an array"):
            vectors(bad)


def test_outputs_that_are_kept_are_not_overwritten_by_the_next_batch() -> None:
    buffer = np.zeros((1, 1))
    kept = []
    for number in range(2):
        buffer[0, 0] = number
        kept += list(sconce_model._bodies.copy_of(buffer))
    assert [float(one[0]) for one in kept] == [0.0, 1.0]
