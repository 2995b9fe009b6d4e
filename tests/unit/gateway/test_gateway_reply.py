"""The client's answer, judged by the openai client's types and by vLLM's own serialisation."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.errors import UpstreamFailed
from gateway.reply import AnswerState, JsonWriter, PrefillAnswer, StreamWriter, read_prefill_answer
from gateway.sse import EventReader
from gateway.text import Detokenizer
from tests.kit.gateway import PROMPT, bpe_tokenizer, end_id, ids_of, prefill_answer

TEXT = 'He said "née\n🙂", and left.\u2028\\'
FIRST, *REST = ids_of(TEXT)


def prefill(**over: Any) -> PrefillAnswer:
    return read_prefill_answer(json.dumps(prefill_answer(FIRST, **over)).encode())


def state(stop: tuple[str, ...] = ()) -> AnswerState:
    return AnswerState(Detokenizer(bpe_tokenizer(), PROMPT, stop))


def events(stream: bytes) -> list[bytes]:
    return EventReader().feed(stream)


def stream(finish: str = "length", *, include_usage: bool = False, stop: tuple[str, ...] = (), **over: Any) -> list[bytes]:
    """All events of an answer in three batches."""
    writer = StreamWriter(prefill(**over), state(stop), include_usage=include_usage)
    ending = [end_id()] if finish == "stop" else REST[-1:]
    middle = REST if finish == "stop" else REST[:-1]
    parts = [
        writer.begin(),
        writer.write([FIRST], None),
        writer.write(middle, None),
        writer.write(ending, finish),
        writer.end(),
    ]
    return events(b"".join(parts))


def chunks(all_events: list[bytes]) -> list[ChatCompletionChunk]:
    return [ChatCompletionChunk.model_validate_json(event) for event in all_events if event != b"[DONE]"]


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("include_usage", [True, False])
def test_a_stream_is_one_answer(finish: str, include_usage: bool) -> None:
    sent = stream(finish, include_usage=include_usage)
    parsed = chunks(sent)
    assert sent.count(b"[DONE]") == 1
    assert sent[-1] == b"[DONE]"
    assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in parsed} == {
        ("chatcmpl-1", 1_700_000_000, "tiny", "chat.completion.chunk")
    }
    deltas = [chunk.choices[0] for chunk in parsed if chunk.choices]
    assert [delta.delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [finish]
    assert "".join(delta.delta.content or "" for delta in deltas) == TEXT


def test_every_chunk_names_finish_reason() -> None:
    for event in stream()[:-1]:
        assert "finish_reason" in json.loads(event)["choices"][0]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_usage_comes_once_without_choices_before_done_and_counts_the_handoff_token(finish: str) -> None:
    *others, last = chunks(stream(finish, include_usage=True))
    assert all(chunk.usage is None for chunk in others)
    assert last.choices == []
    assert last.usage is not None
    tokens = 1 + len(REST) + (finish == "stop")
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), tokens)
    assert last.usage.total_tokens == len(PROMPT) + tokens
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 16


def test_no_usage_unless_asked_for() -> None:
    assert all("usage" not in json.loads(event) for event in stream()[:-1])


def test_a_stop_string_ends_the_stream_and_is_named() -> None:
    writer = StreamWriter(prefill(), state(("née",)), include_usage=False)
    sent = events(writer.begin() + writer.write([FIRST, *REST], None) + writer.end())
    final = json.loads(sent[-2])["choices"][0]
    assert (final["finish_reason"], final["stop_reason"]) == ("stop", "née")
    assert final["delta"]["content"] == 'He said "'


@pytest.mark.parametrize("fingerprint", [None, "fp-1"])
@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_chunks_are_those_that_vllm_writes(
    oracle: SimpleNamespace, fingerprint: str | None, include_usage: bool, role: str
) -> None:
    answer = prefill_answer(FIRST, system_fingerprint=fingerprint)
    answer["choices"][0]["message"]["role"] = role
    writer = StreamWriter(read_prefill_answer(json.dumps(answer).encode()), state(), include_usage=include_usage)
    sent = writer.begin() + writer.write([FIRST, *REST], None) + writer.write([end_id()], "stop") + writer.end()
    types = oracle.chat
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "tiny"}

    def choice(**fields: Any) -> Any:
        return types.ChatCompletionResponseStreamChoice(index=0, logprobs=None, **fields)

    said = types.DeltaMessage(content=TEXT)
    finish = {} if include_usage or fingerprint is None else {"system_fingerprint": fingerprint}
    expected = [
        types.ChatCompletionStreamResponse(
            **head,
            choices=[choice(delta=types.DeltaMessage(role=role, content=""), finish_reason=None)],
            prompt_token_ids=None,
        ),
        types.ChatCompletionStreamResponse(**head, choices=[choice(delta=said, finish_reason=None, token_ids=None)]),
        types.ChatCompletionStreamResponse(
            **head,
            **finish,
            choices=[choice(delta=types.DeltaMessage(content=""), finish_reason="stop", stop_reason=None, token_ids=None)],
        ),
    ]
    dumped = [json.loads(chunk.model_dump_json(exclude_unset=True)) for chunk in expected]
    if include_usage:
        count = {"prompt_tokens": len(PROMPT), "completion_tokens": len(REST) + 2, "total_tokens": len(PROMPT) + len(REST) + 2}
        usage = types.UsageInfo(**count, prompt_tokens_details={"cached_tokens": 16})
        last = types.ChatCompletionStreamResponse(**head, choices=[], usage=usage, system_fingerprint=fingerprint)
        dumped.append(json.loads(last.model_dump_json(exclude_unset=True, exclude_none=True)))
    assert [json.loads(event) for event in events(sent)[:-1]] == dumped


def whole(finish: str = "length", stop: tuple[str, ...] = (), **over: Any) -> dict[str, Any]:
    writer = JsonWriter(prefill(**over), state(stop))
    writer.add([FIRST], None)
    writer.add([*REST, end_id()] if finish == "stop" else REST, finish)
    answer: dict[str, Any] = json.loads(writer.end())
    return answer


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_whole_answer_is_vllms_own_with_the_whole_text(oracle: SimpleNamespace, finish: str) -> None:
    answer = whole(finish)
    parsed = ChatCompletion.model_validate(answer)
    oracle.chat.ChatCompletionResponse.model_validate(answer)
    assert parsed.choices[0].message.content == TEXT
    assert parsed.choices[0].finish_reason == finish
    tokens = 1 + len(REST) + (finish == "stop")
    expected = prefill_answer(FIRST, kv_transfer_params=None)
    expected["choices"][0]["message"]["content"] = TEXT
    expected["choices"][0]["finish_reason"] = finish
    expected["usage"] |= {"completion_tokens": tokens, "total_tokens": len(PROMPT) + tokens}
    assert answer == expected


def test_a_stop_string_ends_a_whole_answer() -> None:
    answer = whole(stop=("née",))
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ('He said "', "stop", "née")


def test_an_error_in_mid_stream_is_one_event_and_no_done_follows() -> None:
    writer = StreamWriter(prefill(), state(), include_usage=True)
    message = 'Traceback:\n  File "x"\r\n\n\ndata: [DONE]\n\n🙂'
    sent = events(writer.begin() + writer.write([FIRST], None) + writer.fail(UpstreamFailed(message, code="decode_lost")))
    assert len(sent) == 3
    error = json.loads(sent[-1])["error"]
    assert error == {"message": message, "type": "upstream_error", "param": None, "code": "decode_lost"}


@given(st.text(), st.text())
def test_any_error_is_one_line(message: str, code: str) -> None:
    error = UpstreamFailed(message, code=code)
    assert b"\n" not in error.body()
    assert b"\r" not in error.body()
    assert json.loads(error.body())["error"]["message"] == message


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([1])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


def readable(body: bytes) -> bool:
    """Fails the test on any other exception than ValueError."""
    try:
        read_prefill_answer(body)
    except ValueError:
        return False
    return True


@given(st.binary(max_size=40))
def test_bytes_that_are_no_answer_are_refused(body: bytes) -> None:
    assert not readable(body)


@given(JSON)
def test_json_that_is_no_answer_is_refused(value: Any) -> None:
    assert not readable(json.dumps(value).encode())


PLACES: list[tuple[Any, ...]] = [
    *(("id",), ("created",), ("model",), ("choices",), ("usage",), ("kv_transfer_params",), ("system_fingerprint",)),
    *(("choices", 0), ("choices", 0, "message"), ("choices", 0, "finish_reason"), ("choices", 0, "message", "role")),
    ("usage", "prompt_tokens"),
]


@given(st.sampled_from(PLACES), JSON, st.booleans())
def test_an_answer_with_any_part_exchanged_or_missing_is_read_or_refused(
    place: tuple[Any, ...], value: Any, remove: bool
) -> None:
    answer: Any = prefill_answer(FIRST)
    target = answer
    for step in place[:-1]:
        target = target[step]
    if remove:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    readable(json.dumps(answer).encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"choices":[]}',
        b"[" * 100_000,
        b'{"created":1e999}',
        b"\xff",
        b'{"a":' + b"9" * 5000 + b"}",
    ],
)
def test_rubbish_is_refused(raw: bytes) -> None:
    assert not readable(raw)


@pytest.mark.parametrize("finish", ["abort", "error", "tool_calls", None, 1])
def test_a_prefill_that_did_not_end_with_its_token_is_refused(finish: Any) -> None:
    answer = prefill_answer(FIRST)
    answer["choices"][0]["finish_reason"] = finish
    assert not readable(json.dumps(answer).encode())


def test_two_choices_are_refused() -> None:
    answer = prefill_answer(FIRST)
    answer["choices"] *= 2
    assert not readable(json.dumps(answer).encode())


@pytest.mark.parametrize(("finish", "finished"), [("stop", True), ("length", False)])
def test_a_first_token_that_ends_the_answer_is_told_from_one_that_does_not(finish: str, finished: bool) -> None:
    answer = prefill_answer(FIRST)
    answer["choices"][0]["finish_reason"] = finish
    assert read_prefill_answer(json.dumps(answer).encode()).finished is finished
