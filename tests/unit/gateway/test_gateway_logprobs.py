"""Logprobs: written as vLLM writes them, and read back out of its answers."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.endpoints import Endpoint
from gateway.logprobs import ChatLogprobs, CompletionLogprobs, read_chat_logprobs, read_completion_logprobs
from gateway.plan import Form, Plan, Sampling
from gateway.tokens import TokenLogprobs
from tests.kit.answers import exchanges
from tests.kit.gateway import MODEL, bpe_tokenizer, ids_of
from tests.kit.lane_replies import cut, lane_of, plan_of, whole_batch
from tests.kit.scripts import Script, id_of, sentencepiece_tokenizer
from tests.kit.vllm_replies import vllm_whole

A, B, C = ids_of("abc")


def plan(alternatives: int, *, as_ids: bool = False) -> Plan:
    return Plan(Endpoint.CHAT, MODEL, Sampling(0.0, logprobs=alternatives), Form(tokens_as_ids=as_ids), 9)


def chat_entry(told: TokenLogprobs, alternatives: int, token: int = A, **form: bool) -> dict[str, Any]:
    (entry,) = ChatLogprobs(bpe_tokenizer(), plan(alternatives, **form)).content((token,), (told,))
    return entry


def completion(told: TokenLogprobs, alternatives: int, token: int = A, **form: bool) -> dict[str, list[Any]]:
    return CompletionLogprobs(bpe_tokenizer(), plan(alternatives, **form)).columns((token,), (told,))


def names(entry: dict[str, Any]) -> list[str]:
    return [top["token"] for top in entry["top_logprobs"]]


def test_the_token_itself_comes_first_even_where_others_are_more_probable() -> None:
    told = TokenLogprobs(-2.0, ((B, -0.5), (C, -1.0)))
    assert names(chat_entry(told, 2)) == ["a", "b"]
    assert list(completion(told, 2)["top_logprobs"][0]) == ["a", "b", "c"]


def test_the_token_itself_is_not_told_twice() -> None:
    told = TokenLogprobs(-0.5, ((B, -0.2), (A, -0.5)))
    assert names(chat_entry(told, 2)) == ["a", "b"]
    assert completion(told, 2)["top_logprobs"] == [{"a": -0.5, "b": -0.2}]


def test_no_alternatives_are_none_in_a_chat_and_the_token_itself_in_a_completion() -> None:
    assert chat_entry(TokenLogprobs(-0.5), 0)["top_logprobs"] == []
    assert completion(TokenLogprobs(-0.5), 0)["top_logprobs"] == [{"a": -0.5}]


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf, -1e30, -9999.5])
def test_what_json_cannot_say_is_the_lowest_logprob(value: float) -> None:
    told = TokenLogprobs(value, ((B, value),))
    entry, columns = chat_entry(told, 2), completion(told, 1)
    assert [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])] == [-9999.0] * 3
    assert columns["token_logprobs"] == [-9999.0]
    assert columns["top_logprobs"] == [{"a": -9999.0, "b": -9999.0}]


def test_tokens_named_by_id_keep_their_own_bytes_in_a_chat() -> None:
    entry = chat_entry(TokenLogprobs(-1.0), 1, as_ids=True)
    assert entry["token"] == f"token_id:{A}"
    assert entry["bytes"] == [97]
    assert entry["top_logprobs"][0]["bytes"] == list(f"token_id:{A}".encode())


def test_offsets_count_the_characters_of_tokens_as_they_are_named_over_all_chunks() -> None:
    told = TokenLogprobs(-1.0)
    for as_ids, expected in ((False, [0, 1, 2]), (True, [0, len(f"token_id:{A}"), len(f"token_id:{A}token_id:{B}")])):
        writer = CompletionLogprobs(bpe_tokenizer(), plan(0, as_ids=as_ids))
        offsets = [writer.columns((A, B), (told, told)), writer.columns((), ()), writer.columns((C,), (told,))]
        assert [offset for columns in offsets for offset in columns["text_offset"]] == expected


def test_tokens_of_the_same_text_are_one_member_of_a_completions_object() -> None:
    first, *rest = ids_of("🙂")
    told = TokenLogprobs(-1.0, ((first, -1.0), (rest[0], -2.0), (B, -3.0)))
    (top,) = completion(told, 3, first)["top_logprobs"]
    assert list(top.items()) == [("", -2.0), ("b", -3.0)]


def test_the_token_that_completes_a_character_has_its_text() -> None:
    ids = ids_of("日")
    told = (TokenLogprobs(-1.0),) * len(ids)
    entries = ChatLogprobs(bpe_tokenizer(), plan(0)).content(ids, told)
    assert [entry["token"] for entry in entries] == [""] * (len(ids) - 1) + ["日"]
    assert entries[-1]["bytes"] == list("日".encode())


def test_a_leading_space_that_the_tokenizer_drops_is_the_tokens_own() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = [id_of(tokenizer, piece) for piece in ("▁the", "▁▁", "top")]
    entries = ChatLogprobs(tokenizer, plan(0)).content(ids, (TokenLogprobs(-1.0),) * 3)
    assert [entry["token"] for entry in entries] == [" the", "  ", "top"]


def test_logprobs_that_are_not_one_for_each_token_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ChatLogprobs(bpe_tokenizer(), plan(0)).content((A, B), (TokenLogprobs(-1.0),))
    lane = lane_of(Endpoint.COMPLETIONS, {"logprobs": 0, "max_tokens": 2}, Script((A, B), (TokenLogprobs(-1.0),) * 2))
    with pytest.raises(ValueError, match="1 logprobs came with 2 tokens"):
        lane.state.feed(replace(whole_batch(Script((A, B)), lane.plan), logprobs=(TokenLogprobs(-1.0),)))


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_what_vllm_says_of_its_tokens_is_read_back_and_written_the_same(endpoint: Endpoint) -> None:
    read = read_chat_logprobs if endpoint is Endpoint.CHAT else read_completion_logprobs

    @settings(derandomize=True, max_examples=100)
    @given(exchanges(endpoint).filter(lambda drawn: bool(drawn[1].logprobs)))
    def check(exchange: tuple[dict[str, Any], Script]) -> None:
        fields, script = exchange
        fields = {name: value for name, value in fields.items() if name != "stop"}
        batch = whole_batch(script, plan_of(endpoint, fields))
        (told,) = vllm_whole(endpoint, {**fields, "return_tokens_as_token_ids": True}, script)["choices"]
        (expected,) = vllm_whole(endpoint, fields, script)["choices"]
        logprobs = read(told["logprobs"], batch.ids)
        writer = (ChatLogprobs if endpoint is Endpoint.CHAT else CompletionLogprobs)(
            script.tokenizer, plan_of(endpoint, fields)
        )
        if isinstance(writer, ChatLogprobs):
            assert {"content": writer.content(batch.ids, logprobs)} == expected["logprobs"]
        else:
            assert writer.columns(batch.ids, logprobs) == expected["logprobs"]

    check()


CHAT = {"token": "token_id:7", "logprob": -1.5, "bytes": [97], "top_logprobs": [{"token": "token_id:9", "logprob": -1.0}]}
COMPLETION = {
    "text_offset": [0],
    "token_logprobs": [-1.5],
    "tokens": ["token_id:7"],
    "top_logprobs": [{"token_id:7": -1.5, "token_id:9": -1.0}],
}


def test_both_forms_are_read() -> None:
    assert read_chat_logprobs({"content": [CHAT]}, (7,)) == (TokenLogprobs(-1.5, ((9, -1.0),)),)
    assert read_completion_logprobs(COMPLETION, (7,)) == (TokenLogprobs(-1.5, ((7, -1.5), (9, -1.0))),)


@pytest.mark.parametrize(
    "token", ["a", "token_id:", "token_id:-1", "token_id:07", "token_id:4294967296", "token_id:7 ", None, 7]
)
def test_a_token_that_is_not_named_by_its_id_is_refused(token: Any) -> None:
    with pytest.raises(ValueError):
        read_chat_logprobs({"content": [CHAT | {"token": token}]})
    with pytest.raises(ValueError):
        read_chat_logprobs({"content": [CHAT | {"top_logprobs": [{"token": token, "logprob": -1.0}]}]})
    with pytest.raises(ValueError):
        read_completion_logprobs(COMPLETION | {"tokens": [token]})
    if isinstance(token, str):
        with pytest.raises(ValueError):
            read_completion_logprobs(COMPLETION | {"top_logprobs": [{token: -1.0}]})


@pytest.mark.parametrize("logprob", [None, "-1", math.nan, -math.inf, -10000.0, True])
def test_a_logprob_that_is_none_is_refused(logprob: Any) -> None:
    with pytest.raises(ValueError):
        read_chat_logprobs({"content": [CHAT | {"logprob": logprob}]})
    with pytest.raises(ValueError):
        read_completion_logprobs(COMPLETION | {"token_logprobs": [logprob]})
    with pytest.raises(ValueError):
        read_completion_logprobs(COMPLETION | {"top_logprobs": [{"token_id:7": logprob}]})


@pytest.mark.parametrize("value", [None, {}, [], {"content": None}, {"content": [{}]}, {"content": [None]}])
def test_what_is_no_chats_logprobs_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        read_chat_logprobs(value)


@pytest.mark.parametrize("name", ["token_logprobs", "tokens", "top_logprobs"])
@pytest.mark.parametrize("value", [None, [], [None], {}, [[]]])
def test_what_is_no_completions_logprobs_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError):
        read_completion_logprobs(COMPLETION | {name: value})


def test_logprobs_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[7\], not of \[8\]"):
        read_chat_logprobs({"content": [CHAT]}, (8,))
    with pytest.raises(ValueError, match=r"\[7\], not of \[7, 8\]"):
        read_completion_logprobs(COMPLETION, (7, 8))


@given(
    st.recursive(
        st.none() | st.floats() | st.text(max_size=3), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_other_json_is_refused(value: Any) -> None:
    for read in (read_chat_logprobs, read_completion_logprobs):
        with pytest.raises(ValueError):
            read(value)


def test_logprobs_are_cut_with_the_tokens_that_a_stop_string_cuts() -> None:
    ids = tuple(ids_of("stop here. END"))
    told = tuple(TokenLogprobs(-float(index)) for index in range(len(ids)))
    fields = {"logprobs": 0, "stop": "here", "max_tokens": len(ids)}
    lane = lane_of(Endpoint.COMPLETIONS, fields, Script(ids, told))
    delta = lane.state.feed(cut(whole_batch(Script(ids, told), lane.plan), ())[0])
    kept = len(ids_of("stop here"))
    assert (delta.ids, delta.logprobs) == (ids[:kept], told[:kept])


def test_a_first_token_that_cannot_come_has_a_logprob_that_json_can_say() -> None:
    script = Script((A, B), (TokenLogprobs(-math.inf, ((B, 0.0),)), TokenLogprobs(-0.5, ((B, -0.5),))))
    for endpoint in Endpoint:
        fields = {"logprobs": 1} if endpoint is Endpoint.COMPLETIONS else {"logprobs": True, "top_logprobs": 1}
        lane = lane_of(endpoint, {**fields, "max_tokens": 2}, script)
        (first,) = lane.prefill.logprobs
        assert first.logprob == -9999.0
        assert "Infinity" not in json.dumps(lane.prefill.raw)
