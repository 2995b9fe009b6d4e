"""The suite's own control: what it compares with notices what is to be noticed, and allows only what is in the table."""

import json
from itertools import combinations
from typing import Any

import httpx
import pytest

from tests.fidelity.answer import Answer, read
from tests.fidelity.case import chat
from tests.fidelity.compare import Difference, differences
from tests.fidelity.near_tie import parting
from tests.fidelity.pairwise import cover

_ALTERNATIVES = [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.5, "bytes": [98]}]


def whole(**changes: Any) -> Answer:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": changes.pop("top", _ALTERNATIVES)}
    choice = {"index": 0, "text": "a", "logprobs": {"content": [entry]}, "finish_reason": "stop", "stop_reason": None}
    answer = {"id": "chatcmpl-" + "0" * 36, "created": 100, "choices": [choice | changes.pop("choice", {})], **changes}
    return read(httpx.Response(200, json=answer))


def stream(*chunks: dict[str, Any], done: bool = True) -> Answer:
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"] * done
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    return read(httpx.Response(200, content="".join(events).encode(), headers=headers))


def chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    if finish is not None:
        choice["stop_reason"] = None
    head = {"id": "chatcmpl-" + "0" * 36, "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**head, "choices": [choice | {"token_ids": None}], **more}


def found(plain: Answer, lane: Answer) -> list[Difference]:
    return [difference for difference in differences(chat("c"), plain, lane) if difference.allowed is None]


def test_the_same_answer_has_no_difference() -> None:
    assert found(whole(), whole(id="chatcmpl-" + "1" * 36, created=104)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "cmpl-" + "0" * 36},
        {"created": 10_000},
        {"kv_transfer_params": None},
        {"choice": {"text": "b"}},
        {"choice": {"stop_reason": 2}},
        {"choice": {"index": 0.0}},
        {"choice": {"token_ids": None}},
        {"top": [_ALTERNATIVES[0]]},
        {"top": [_ALTERNATIVES[0] | {"logprob": -0.503}, _ALTERNATIVES[1]]},
        {"top": [_ALTERNATIVES[0], _ALTERNATIVES[1] | {"token": "c", "logprob": -1.6}]},
    ],
    ids=str,
)
def test_a_difference_is_noticed(changes: dict[str, Any]) -> None:
    assert found(whole(), whole(**changes))
    assert found(whole(**changes), whole())


def test_an_absent_field_is_not_a_null_one() -> None:
    assert [d.path for d in found(whole(metrics=None), whole())] == ["metrics"]


def test_members_in_another_order_are_noticed() -> None:
    assert found(whole(a=1, b=2), whole(b=2, a=1))


def test_equally_probable_alternatives_may_trade_places() -> None:
    near = [_ALTERNATIVES[0], _ALTERNATIVES[1] | {"token": "c", "logprob": -1.501}]
    assert found(whole(), whole(top=near)) == []


def test_where_a_stream_is_cut_makes_no_difference() -> None:
    assert found(stream(chunk("a"), chunk("b"), chunk("c", "stop")), stream(chunk("ab"), chunk("c", "stop"))) == []


@pytest.mark.parametrize(
    "lane",
    [
        stream(chunk("a"), chunk("", "stop"), done=False),
        stream(chunk("a"), chunk("")),
        stream(chunk("a"), chunk("", "stop"), chunk("")),
        stream(chunk("a"), chunk("", "stop", created=2)),
        stream(chunk("a", usage=None), chunk("", "stop")),
        stream(chunk("a"), chunk("", "stop", system_fingerprint="f")),
        stream(chunk("a"), chunk("b", "stop")),
        stream(chunk("a"), chunk("", "length")),
        stream({"error": {"message": "m"}}),
    ],
)
def test_a_stream_that_is_not_the_same_is_noticed(lane: Answer) -> None:
    assert found(stream(chunk("a"), chunk("", "stop")), lane)


def test_an_error_is_compared_byte_for_byte() -> None:
    plain = read(httpx.Response(400, content=b'{"error": {"message": "m"}}'))
    assert found(plain, read(httpx.Response(400, content=b'{"error":{"message":"m"}}')))
    assert found(plain, read(httpx.Response(404, content=plain.raw)))


@pytest.mark.parametrize(("gap", "near"), [(5e-4, True), (5e-3, False)])
def test_answers_part_at_a_near_tie_only_where_two_tokens_are_as_probable(gap: float, near: bool) -> None:
    def answer(token: int) -> Any:
        top = {"token_id:7": -1.0, "token_id:8": -1.0 - gap}
        logprobs = {"top_logprobs": [top], "tokens": [f"token_id:{token}"], "token_logprobs": [top[f"token_id:{token}"]]}
        return {"choices": [{"token_ids": [token], "logprobs": logprobs}]}

    assert (parting(answer(7), answer(8)) is not None) == near
    assert parting(answer(7), answer(7)) is None


def test_every_pair_of_values_is_in_some_row() -> None:
    axes = {"a": ["1", "2", "3"], "b": ["1", "2"], "c": ["1", "2", "3", "4"]}
    rows = cover(axes)
    for one, other in combinations(axes, 2):
        assert {(row[one], row[other]) for row in rows} == {(x, y) for x in axes[one] for y in axes[other]}
    assert len(rows) <= 15
