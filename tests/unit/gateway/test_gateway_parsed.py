"""Streams whose message vLLM's parsers make: what goes to them when, and what the client gets, with a scripted parser."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from gateway.parsed import ParsedStream, Parts
from gateway.reasoning import ReasoningTokens
from gateway.rendering import ToolChoice
from gateway.sse import EventReader
from gateway.tokens import Batch, TokenLogprobs
from gateway.upstream import UpstreamUnavailable
from tests.kit.gateway import MODEL, PROMPT
from tests.kit.parser import CLOSING, END, FIRST, OPENING, REST, Parser, call, of, parts, stopped

AUTO, REQUIRED, NAMED = ToolChoice.AUTO, ToolChoice.REQUIRED, ToolChoice.NAMED


async def streamed(answer: Parts, batches: AsyncIterator[Batch]) -> list[Any]:
    """The stream's events, parsed; [DONE] as it is."""
    said = b"".join([chunk async for chunk in ParsedStream(answer).chunks(batches)])
    return [event if event == b"[DONE]" else json.loads(event) for event in EventReader().feed(said)]


def choices(events: Sequence[Any]) -> list[dict[str, Any]]:
    return [choice for event in events if isinstance(event, dict) for choice in event["choices"]]


class TestPieces:
    async def test_tokens_that_come_while_the_parser_works_go_with_its_next_call_eight_at_most(self) -> None:
        parser, tokens = Parser(busy=asyncio.Event()), asyncio.Queue[Batch]()
        taken = asyncio.Event()

        async def decoding() -> AsyncIterator[Batch]:
            yield Batch((FIRST,))
            await parser.entered.wait()
            for token in REST[:11]:
                yield Batch((token,))
            taken.set()
            yield await tokens.get()

        stream = ParsedStream(parts(parser)).chunks(decoding())
        await anext(stream)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.wait_for(taken.wait(), 5)
        assert parser.pieces == [([FIRST], None)], "the decode goes on while the parser works"
        assert parser.busy is not None
        parser.busy.set()
        await first
        tokens.put_nowait(Batch((END,), "stop"))
        assert [chunk async for chunk in stream][-1] == b"data: [DONE]\n\n"
        assert parser.pieces == [([FIRST], None), (REST[:8], None), (REST[8:11], None), ([], "stop")]

    async def test_a_marker_goes_alone(self) -> None:
        parser = Parser()
        await streamed(parts(parser, markers=frozenset({OPENING, CLOSING})), stopped([*REST[:2], OPENING, CLOSING, *REST[2:4]]))
        assert [ids for ids, _ in parser.pieces] == [[FIRST, *REST[:2]], [OPENING], [CLOSING], REST[2:4], []]

    async def test_the_last_token_goes_alone_with_the_finish(self) -> None:
        parser = Parser()
        await streamed(parts(parser), of(Batch((FIRST,)), Batch(tuple(REST[:4]), "length")))
        assert parser.pieces == [([FIRST, *REST[:3]], None), ([REST[3]], "length")]

    async def test_a_finish_that_comes_after_the_last_token_is_told_without_one(self) -> None:
        parser, read = Parser(), asyncio.Event()

        async def resumed() -> AsyncIterator[Batch]:
            yield Batch((FIRST,))
            await read.wait()
            yield Batch((), "length")

        stream = ParsedStream(parts(parser)).chunks(resumed())
        shown = [await anext(stream), await anext(stream)]
        read.set()
        shown += [chunk async for chunk in stream]
        assert parser.pieces == [([FIRST], None), ([], "length")]
        assert b'"finish_reason":"length"' in shown[2]

    async def test_a_stop_ids_text_reaches_no_parser_unless_it_is_to_be_included(self) -> None:
        kept, included = Parser(), Parser()
        await streamed(parts(kept), stopped(REST[:1]))
        await streamed(parts(included, form={"include_stop": True}), stopped(REST[:1]))
        assert [parser.pieces[-1] for parser in (kept, included)] == [([], "stop"), ([END], "stop")]

    async def test_tokens_that_vllm_skips_before_it_parses_reach_no_parser(self) -> None:
        parser = Parser()
        answer = parts(
            parser, unseen=frozenset({OPENING, END}), markers=frozenset({OPENING, END}), form={"return_token_ids": True}
        )
        events = await streamed(answer, stopped([OPENING, REST[0]]))
        assert [ids for ids, _ in parser.pieces] == [[FIRST], [REST[0]], []]
        assert [choice["token_ids"] for choice in choices(events)[1:]] == [[FIRST], [OPENING], [REST[0]], [END]]

    async def test_each_call_carries_the_request_and_what_vllm_said_last(self) -> None:
        parser = Parser()
        await streamed(parts(parser), stopped(REST[:1]))
        assert [asked["stream_state"] for asked in parser.asked] == [{"role_sent": True}, {"calls": 1}]
        common = {"model": MODEL, "chat_request": {"messages": []}, "prompt_token_ids": list(PROMPT), "stream": True}
        assert all(asked.items() >= common.items() for asked in parser.asked)


class TestStream:
    async def test_the_role_comes_first_and_never_again(self) -> None:
        events = await streamed(parts(Parser()), stopped(REST[:3]))
        deltas = [choice["delta"] for choice in choices(events)]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all(list(delta) == ["content"] for delta in deltas[1:-1])
        assert events[-1] == b"[DONE]"

    async def test_a_delta_holds_only_what_it_carries(self) -> None:
        function = {"name": "f", "arguments": None}
        told = {
            "content": None,
            "reasoning": "",
            "tool_calls": [{"id": "1", "type": "function", "index": 0, "function": function}],
        }
        events = await streamed(parts(Parser(delta=lambda ids: told)), of(Batch((FIRST,), "length")))
        assert choices(events)[1] == {
            "index": 0,
            "delta": {"reasoning": "", "tool_calls": [{"id": "1", "type": "function", "index": 0, "function": {"name": "f"}}]},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
        }

    async def test_what_the_parser_holds_back_is_no_chunk_but_is_counted(self) -> None:
        held = Parser(delta=lambda ids: {"content": "all"} if ids == [REST[1]] else {"tool_calls": []})
        form = {"include_usage": True, "continuous_usage": True}
        answer = parts(held, form=form, markers=frozenset(REST[:2]))
        events = await streamed(answer, stopped(REST[:2]))
        assert [choice["delta"] for choice in choices(events)[1:]] == [{"content": "all"}, {}]
        assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [0, 3, 4, 4], "the role, two chunks, the usage"

    async def test_ids_that_are_asked_for_are_told_even_where_nothing_is_said(self) -> None:
        held = Parser(delta=lambda ids: {})
        events = await streamed(parts(held, form={"return_token_ids": True}), stopped(REST[:3]))
        assert events[0]["prompt_token_ids"] == list(PROMPT)
        told = [(choice["delta"], choice["token_ids"]) for choice in choices(events)[1:]]
        assert told == [({}, [FIRST, *REST[:3]]), ({}, [END])]

    async def test_logprobs_go_with_their_tokens(self) -> None:
        answer = parts(Parser(), sampling={"logprobs": 0})
        first, last = TokenLogprobs(-0.5), TokenLogprobs(-1.5)
        events = await streamed(answer, of(Batch((FIRST,), None, (first,)), Batch((REST[0], END), "stop", (last, first))))
        told = [[entry["logprob"] for entry in choice["logprobs"]["content"]] for choice in choices(events)[1:]]
        assert told == [[-0.5, -1.5], [-0.5]]

    async def test_hidden_reasoning_hides_ids_and_logprobs_but_not_the_prompts_ids(self) -> None:
        answer = parts(Parser(delta=lambda ids: {}), hidden=True, form={"return_token_ids": True}, sampling={"logprobs": 0})
        told = TokenLogprobs(-0.5)
        events = await streamed(answer, of(Batch((FIRST,), None, (told,)), Batch((REST[0], END), "stop", (told, told))))
        assert events[0]["prompt_token_ids"] == list(PROMPT)
        ((_, last),) = [choices(events)]
        assert (last["delta"], last["token_ids"], last["logprobs"]) == ({}, None, None)

    async def test_hidden_reasoning_is_null_beside_whatever_else_is_said(self) -> None:
        events = await streamed(parts(Parser(delta=lambda ids: {"content": "x"}), hidden=True), stopped(REST[:1]))
        deltas = [list(choice["delta"].items()) for choice in choices(events)[1:]]
        assert deltas == [[("content", "x"), ("reasoning", None)]] * 2

    async def test_tokens_of_reasoning_are_counted_in_usage(self) -> None:
        form = {"include_usage": True, "continuous_usage": True}
        answer = parts(Parser(), form=form, markers=frozenset({OPENING, CLOSING}), reasoning=ReasoningTokens(OPENING, CLOSING))
        events = await streamed(answer, stopped([OPENING, *REST[:3], CLOSING, REST[3]]))
        counts = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in events[:-1]]
        assert counts == [0, 0, 0, 3, 3, 3, 3, 3]

    @pytest.mark.parametrize(
        ("choice", "called", "finish", "told"),
        [
            (AUTO, True, "stop", "tool_calls"),
            (AUTO, True, "length", "length"),
            (AUTO, False, "stop", "stop"),
            (REQUIRED, True, "stop", "tool_calls"),
            (REQUIRED, False, "stop", "stop"),
            (NAMED, True, "stop", "stop"),
        ],
    )
    async def test_the_finish_reason_follows_vllms_rules(
        self, choice: ToolChoice, called: bool, finish: str, told: str
    ) -> None:
        parser = Parser(delta=lambda ids: {"tool_calls": [call(0)]} if called and FIRST in ids else {})
        last = (REST[0], END) if finish == "stop" else (REST[0],)
        events = await streamed(parts(parser, choice=choice), of(Batch((FIRST,)), Batch(last, finish)))
        assert choices(events)[-1]["finish_reason"] == told

    async def test_a_stop_id_that_is_not_the_tokenizers_own_is_named(self) -> None:
        events = await streamed(parts(Parser(), sampling={"stop_token_ids": (REST[1],)}), of(Batch((FIRST, REST[1]), "stop")))
        assert (choices(events)[-1]["finish_reason"], choices(events)[-1]["stop_reason"]) == ("stop", REST[1])


class TestFailures:
    @pytest.mark.parametrize("how", [{"status": 400}, {"lost": 2}])
    async def test_a_parser_that_fails_ends_the_stream_with_an_error(self, how: dict[str, int]) -> None:
        parser = Parser(**how)  # type: ignore[arg-type]
        stream = ParsedStream(parts(parser))
        shown = [chunk async for chunk in stream.chunks(stopped(REST))]
        assert json.loads(shown[-1].removeprefix(b"data: "))["error"]["code"] == "decode_lost"
        assert not any(b"[DONE]" in chunk for chunk in shown)
        assert isinstance(stream.error, UpstreamUnavailable)

    async def test_a_call_that_was_lost_is_made_again(self) -> None:
        parser = Parser(lost=1)
        events = await streamed(parts(parser), stopped(REST[:1]))
        assert parser.asked[0] == parser.asked[1]
        assert events[-1] == b"[DONE]"

    @pytest.mark.parametrize(
        "ending",
        [UpstreamUnavailable("gone"), ValueError("no logprobs"), None],
    )
    async def test_tokens_that_break_off_end_the_stream_with_an_error_after_what_there_was(
        self, ending: Exception | None
    ) -> None:
        async def broken() -> AsyncIterator[Batch]:
            yield Batch((FIRST, *REST[:2]))
            if ending is not None:
                raise ending

        parser = Parser()
        stream = ParsedStream(parts(parser))
        shown = [chunk async for chunk in stream.chunks(broken())]
        assert [ids for ids, _ in parser.pieces] == [[FIRST, *REST[:2]]]
        assert b'"error"' in shown[-1]
        assert stream.error is not None if ending is None else stream.error is ending

    async def test_a_client_that_leaves_ends_the_call_and_the_reading(self) -> None:
        parser, left = Parser(busy=asyncio.Event()), asyncio.Event()

        async def decoding() -> AsyncIterator[Batch]:
            try:
                yield Batch((FIRST,))
                await asyncio.Event().wait()
            finally:
                left.set()

        stream = ParsedStream(parts(parser)).chunks(decoding())
        await anext(stream)
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.wait_for(parser.entered.wait(), 5)
        reading.cancel()
        await asyncio.wait([reading], timeout=5)
        await stream.aclose()
        assert left.is_set()
        assert parser.inside == 0
