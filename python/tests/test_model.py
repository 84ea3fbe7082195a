"""`sconce_model`, as who writes a class uses it."""

from __future__ import annotations

import base64
import struct
from typing import Any, Callable, Optional

import classes
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
    ):
        with pytest.raises(ClassProblem) as raised:
            sconce_model.load(Served, options=given)
        assert str(raised.value) == message
    with pytest.raises(ClassProblem, match="options.name is not set; Fussy needs it, of the type str"):
        sconce_model.load(classes.Fussy)


def test_an_error_of_a_task_has_a_status_of_the_requester() -> None:
    with pytest.raises(ValueError, match="from 400 to 499, not 500; for a fault, raise another exception"):
        TaskError(500, "no")
