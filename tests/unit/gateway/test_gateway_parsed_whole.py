"""Answers that do not stream and whose message vLLM's parsers make, with a scripted parser."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.parsed import Parts, parsed_whole
from gateway.reasoning import ReasoningTokens
from gateway.rendering import ToolChoice
from gateway.tokens import Batch, TokenLogprobs
from gateway.upstream import UpstreamUnavailable
from tests.kit.gateway import PROMPT
from tests.kit.parser import CLOSING, END, FIRST, FUNCTION, OPENING, REST, Parser, call, of, parts, stopped

AUTO, REQUIRED, NAMED, NONE = ToolChoice.AUTO, ToolChoice.REQUIRED, ToolChoice.NAMED, ToolChoice.NONE


async def whole(answer: Parts, batches: AsyncIterator[Batch]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(await parsed_whole(answer, batches))
    return said


class TestWhole:
    async def test_one_call_makes_the_message_of_all_tokens(self) -> None:
        parser = Parser(message={"content": "said", "reasoning": "thought"})
        answer = await whole(parts(parser, form={"return_token_ids": True}), stopped(REST[:3]))
        assert parser.pieces == [([FIRST, *REST[:3]], "stop")]
        (asked,) = parser.asked
        assert asked["generate_response"]["prompt_token_ids"] == list(PROMPT)
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "said", "reasoning": "thought"}
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert (choice["token_ids"], answer["prompt_token_ids"]) == ([FIRST, *REST[:3], END], list(PROMPT))
        assert (answer["id"], answer["usage"]["completion_tokens"]) == ("chatcmpl-1", 5)
        assert answer["kv_transfer_params"] is None

    @pytest.mark.parametrize("batch", [Batch((END,), "stop"), Batch((FIRST,), "length"), Batch((OPENING, END), "stop")])
    async def test_a_text_that_vllm_has_parsed_already_is_not_sent_again(self, batch: Batch) -> None:
        parser = Parser()
        answer = parts(parser, unseen=frozenset({OPENING}), first={"content": None, "reasoning": ""})
        said = await whole(answer, of(batch))
        assert parser.asked == []
        assert said["choices"][0]["message"]["reasoning"] == ""
        assert said["choices"][0]["finish_reason"] == batch.finish

    @pytest.mark.parametrize(
        ("choice", "called", "finish", "told"),
        [
            (AUTO, True, "stop", "tool_calls"),
            (AUTO, True, "length", "tool_calls"),
            (AUTO, False, "stop", "stop"),
            (REQUIRED, True, "stop", "tool_calls"),
            (REQUIRED, True, "length", "length"),
            (REQUIRED, False, "stop", "tool_calls"),
            (NAMED, True, "stop", "stop"),
            (NONE, True, "stop", "stop"),
        ],
    )
    async def test_the_finish_reason_follows_vllms_rules(
        self, choice: ToolChoice, called: bool, finish: str, told: str
    ) -> None:
        calls = [{"id": "x", "type": "function", "function": FUNCTION}] if called else []
        last = (REST[0], END) if finish == "stop" else (REST[0],)
        answer = await whole(parts(Parser(message={"tool_calls": calls}), choice=choice), of(Batch((FIRST, *last), finish)))
        (said,) = answer["choices"]
        assert said["finish_reason"] == told
        assert ("tool_calls" in said["message"]) == (called and choice is not NONE)

    @pytest.mark.parametrize(("one_call", "ids"), [(False, ["id-of-0", "id-of-1"]), (True, ["id-of-0"])])
    async def test_calls_have_the_ids_that_the_parser_chose_and_are_as_many_as_wanted(
        self, one_call: bool, ids: list[str]
    ) -> None:
        """The endpoint tells random ids where it does not stream."""
        calls = [{"id": "random", "type": "function", "function": FUNCTION}] * 2
        parser = Parser(message={"tool_calls": calls}, delta=lambda _: {"tool_calls": [call(0), call(1)]})
        answer = await whole(parts(parser, one_call=one_call), stopped(REST))
        message = answer["choices"][0]["message"]
        assert [said["id"] for said in message["tool_calls"]] == ids
        assert list(message) == ["role", "content", "tool_calls", "reasoning"]

    async def test_calls_without_a_parsers_ids_get_ids_of_vllms_form(self) -> None:
        calls = [{"id": "random", "type": "function", "function": FUNCTION}]
        answer = await whole(parts(Parser(message={"tool_calls": calls})), stopped(REST))
        (said,) = answer["choices"][0]["message"]["tool_calls"]
        assert said["id"].startswith("chatcmpl-tool-")
        assert len(said["id"]) == len("chatcmpl-tool-a11d08eadef4d9e8")

    async def test_hidden_reasoning_hides_ids_and_logprobs(self) -> None:
        told = TokenLogprobs(-0.5)
        answer = parts(Parser(), hidden=True, form={"return_token_ids": True}, sampling={"logprobs": 0})
        said = await whole(answer, of(Batch((FIRST, REST[0], END), "stop", (told, told, told))))
        assert (said["choices"][0]["token_ids"], said["choices"][0]["logprobs"]) == (None, None)
        assert said["prompt_token_ids"] == list(PROMPT)

    async def test_logprobs_are_those_of_all_tokens(self) -> None:
        said = await whole(
            parts(Parser(), sampling={"logprobs": 0}),
            of(Batch((FIRST,), None, (TokenLogprobs(-1.0),)), Batch((END,), "stop", (TokenLogprobs(-2.0),))),
        )
        assert [entry["logprob"] for entry in said["choices"][0]["logprobs"]["content"]] == [-1.0, -2.0]

    async def test_tokens_of_reasoning_are_counted_in_usage(self) -> None:
        answer = parts(Parser(), reasoning=ReasoningTokens(OPENING, CLOSING))
        said = await whole(answer, stopped([OPENING, *REST[:3], CLOSING, REST[3]]))
        assert said["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}

    @pytest.mark.parametrize("how", [{"status": 400}, {"status": 500}, {"lost": 2}])
    async def test_a_parser_that_fails_leaves_the_answer_to_others(self, how: dict[str, int]) -> None:
        with pytest.raises(UpstreamUnavailable):
            await whole(parts(Parser(**how)), stopped(REST))  # type: ignore[arg-type]

    async def test_tokens_without_a_finish_are_no_answer(self) -> None:
        with pytest.raises(UpstreamUnavailable, match="finish"):
            await whole(parts(Parser()), of(Batch((FIRST, *REST))))
