"""Answers that vLLM's own parsers make: what the lane asks vLLM before and after, and who goes on when a part fails."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from gateway.errors import LaneUnavailable
from gateway.grammars import Grammar, GrammarKind
from gateway.lane import Plain, Prefill, Refusal
from gateway.rendering import DERENDER_PATH, RENDER_PATH, Rendered
from gateway.slo import SloClass, Wish
from handoff import decode_pb2 as pb
from tests.kit.gateway import PROMPT, bpe_tokenizer, handed_over
from tests.kit.legs import ScriptedDaemon, ScriptedVllm, Step, answers, breaks, hangs, landed, reserved
from tests.kit.relay import (
    CHAT,
    COMPLETIONS,
    END,
    FIRST,
    MID_STREAM,
    REST,
    SO_FAR,
    TEXT,
    answer_of_vllm,
    body_of,
    decoded,
    events,
    freed,
    relayed,
    said,
)
from tests.kit.rig import Rig, rig
from tests.kit.valkey import eventually

ALLOW, DENY = Wish(SloClass.LATENCY, fallback=True), Wish(SloClass.LATENCY, fallback=False)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TOOLS: dict[str, Any] = {"tools": [TOOL]}
RENDERED = Rendered(PROMPT, grammar=None, stop_token_ids=(), skip_special_tokens=True, reasons=False)
BOTH = pytest.mark.parametrize("stream", [True, False])


def parser() -> Any:
    """vLLM's derender endpoint, with a parser that leaves a text as it is."""

    async def handler(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        (choice,) = asked["generate_chunk" if asked["stream"] else "generate_response"]["choices"]
        text = bpe_tokenizer().decode(choice["token_ids"])
        if asked["stream"]:
            return web.json_response({"chunk": {"choices": [{"delta": {"content": text}}]}, "stream_state": {}})
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})

    return handler


class TestRequest:
    @pytest.fixture
    async def lane(self, redis_url: str, vllm: ScriptedVllm) -> AsyncIterator[tuple[Rig, ScriptedDaemon]]:
        daemon = ScriptedDaemon((reserved(), "hang"))
        async with daemon.registered(redis_url), rig(redis_url, vllm, tools="derender", tokenize_timeout_s=0.3) as made:
            yield made, daemon

    async def test_vllm_renders_the_prompt_and_the_daemon_gets_the_grammar_of_the_tools(
        self, lane: tuple[Rig, ScriptedDaemon]
    ) -> None:
        made, daemon = lane
        sampling = {"stop_token_ids": [7], "structured_outputs": {"regex": "[0-9]+"}}
        made.vllm.answers[RENDER_PATH] = answers({"token_ids": list(PROMPT), "sampling_params": sampling})
        decision = await made.decide(ALLOW, tool_choice="required", **TOOLS)
        assert isinstance(decision, Prefill)
        (asked,) = made.vllm.asked
        assert (asked.path, asked.headers["authorization"]) == (RENDER_PATH, "Bearer client")
        assert asked.json()["tools"] == [TOOL]
        (decode,) = daemon.requests
        assert (decode.grammar.kind, decode.grammar.source) == (pb.Grammar.REGEX, "[0-9]+")
        assert list(decode.stop_token_ids) == sorted([7, END])
        assert decision.rendered is not None
        assert decision.rendered.prompt == PROMPT
        assert "structured_outputs" not in json.loads(decision.body), "vLLM makes the tools' grammar itself"
        assert json.loads(decision.body)["tools"] == [TOOL]
        decision.stream.cancel()

    async def test_a_rendered_prompt_is_as_long_as_it_is(self, lane: tuple[Rig, ScriptedDaemon]) -> None:
        made, _ = lane
        made.vllm.answers[RENDER_PATH] = answers({"token_ids": [1] * 4096, "sampling_params": {}})
        assert await made.decide(ALLOW, **TOOLS) == Plain("too_long")
        assert made.vllm.paths() == [RENDER_PATH]

    @pytest.mark.parametrize(
        ("handler", "reason"),
        [
            (answers({"error": {}}, 400), "refused_by_vllm"),
            (answers({"detail": "Not Found"}, 404), "derender_unavailable"),
            (answers({}, 503), "prompt_not_counted"),
            (answers(b"x"), "prompt_not_counted"),
            (hangs, "prompt_not_counted"),
            (breaks, "prompt_not_counted"),
        ],
    )
    async def test_what_vllm_does_not_render_it_serves_itself(
        self, lane: tuple[Rig, ScriptedDaemon], handler: Any, reason: str
    ) -> None:
        made, daemon = lane
        made.vllm.answers[RENDER_PATH] = handler
        assert await made.decide(ALLOW, **TOOLS) == Plain(reason)
        assert daemon.requests == []

    async def test_deny_says_that_vllm_does_not_render(self, lane: tuple[Rig, ScriptedDaemon]) -> None:
        made, _ = lane
        made.vllm.answers[RENDER_PATH] = answers({"detail": "Not Found"}, 404)
        refused = await made.decide(DENY, **TOOLS)
        assert isinstance(refused, Refusal)
        assert isinstance(refused.error, LaneUnavailable)

    async def test_requests_without_tools_are_not_rendered(self, lane: tuple[Rig, ScriptedDaemon]) -> None:
        made, _ = lane
        decision = await made.decide(ALLOW)
        assert isinstance(decision, Prefill)
        assert decision.rendered is None
        assert made.vllm.asked == []
        decision.stream.cancel()

    async def test_where_no_parser_is_to_be_asked_tools_are_vllms(self, redis_url: str, vllm: ScriptedVllm) -> None:
        async with ScriptedDaemon(("hang",)).registered(redis_url), rig(redis_url, vllm) as made:
            assert await made.decide(ALLOW, **TOOLS) == Plain("unsupported_tools")


@BOTH
async def test_an_answer_is_what_vllms_parsers_make_of_its_tokens(vllm: ScriptedVllm, stream: bool) -> None:
    vllm.answers[DERENDER_PATH] = parser()
    script = [landed(FIRST), *decoded([*REST, END])]
    async with relayed(script, vllm, rendered=RENDERED, stream=stream, **TOOLS) as served:
        assert said(await body_of(served, answer_of_vllm())) == (TEXT, "stop")
        assert served.relay.outcome == "completed"
    assert set(vllm.paths()) == {DERENDER_PATH}
    assert all(asked.headers["authorization"] == "Bearer client" for asked in vllm.asked)


@BOTH
async def test_a_first_token_that_ends_the_answer_holds_no_slot(vllm: ScriptedVllm, stream: bool) -> None:
    vllm.answers[DERENDER_PATH] = parser()
    async with relayed(["hang"], vllm, rendered=RENDERED, stream=stream, max_tokens=1, **TOOLS) as served:
        assert said(await body_of(served, answer_of_vllm())) == (bpe_tokenizer().decode([FIRST]), "length")
        await freed(served)


@pytest.mark.parametrize("prompt", [PROMPT[:-1], (*PROMPT[:-1], PROMPT[-1] + 1)])
async def test_a_prompt_that_is_not_the_one_rendered_is_served_by_vllm(vllm: ScriptedVllm, prompt: tuple[int, ...]) -> None:
    vllm.answers[CHAT] = answers({"own": 1})
    async with relayed(["hang"], vllm, rendered=RENDERED, **TOOLS) as served:
        assert json.loads(await body_of(served, answer_of_vllm(prompt=prompt))) == {"own": 1}
        assert served.value("anchorleg_resumed_total", reason="no_handoff", way="whole") == 1
        await freed(served)


async def test_a_rendered_prompt_is_compared_from_its_first_id_on(vllm: ScriptedVllm) -> None:
    """A template may print the clock where the prompt begins, far from the ids that a handoff names one by one."""
    prompt = [*range(100, 200), *PROMPT]
    vllm.answers[CHAT] = answers({"own": 1})
    rendered = Rendered((99, *prompt[1:]), grammar=None, stop_token_ids=(), skip_special_tokens=True, reasons=False)
    async with relayed(["hang"], vllm, rendered=rendered, **TOOLS) as served:
        assert json.loads(await body_of(served, answer_of_vllm(prompt=prompt))) == {"own": 1}
        assert served.value("anchorleg_resumed_total", reason="no_handoff", way="whole") == 1
        await freed(served)


async def test_a_whole_answer_whose_daemon_fails_is_served_by_vllm(vllm: ScriptedVllm) -> None:
    vllm.answers[CHAT] = answers({"own": 1})
    async with relayed([*MID_STREAM, "die"], vllm, rendered=RENDERED, **TOOLS) as served:
        assert json.loads(await body_of(served, answer_of_vllm())) == {"own": 1}
        assert served.value("anchorleg_resumed_total", reason="unreachable", way="whole") == 1
    assert vllm.paths() == [CHAT]


async def test_a_stream_whose_daemon_fails_goes_on_at_another(redis_url: str, vllm: ScriptedVllm) -> None:
    vllm.answers = {
        DERENDER_PATH: parser(),
        COMPLETIONS: answers({"kv_transfer_params": handed_over(SO_FAR[-1])}),
    }
    rest = [*REST, END][len(SO_FAR) - 1 :]
    second: list[Step] = [reserved(), landed(SO_FAR[-1], [*PROMPT, *SO_FAR[:-1]]), *decoded(rest)]
    grammar = Rendered(PROMPT, Grammar(GrammarKind.REGEX, ".*"), (), skip_special_tokens=True, reasons=False)
    async with (
        ScriptedDaemon(second).registered(redis_url) as daemon,
        relayed(
            [*MID_STREAM, "die"], vllm, redis_url=redis_url, rendered=grammar, stream=True, temperature=0, **TOOLS
        ) as served,
    ):
        assert said(await body_of(served, answer_of_vllm())) == (TEXT, "stop")
        assert served.relay.outcome == "resumed"
        assert served.value("anchorleg_resumed_total", reason="unreachable", way="daemon") == 1
        assert daemon.requests[0].answered == len(SO_FAR) - 1


async def test_a_stream_that_nobody_goes_on_with_ends_with_an_error(vllm: ScriptedVllm) -> None:
    vllm.answers[DERENDER_PATH] = parser()
    async with relayed([*MID_STREAM, "die"], vllm, rendered=RENDERED, stream=True, temperature=0, **TOOLS) as served:
        *shown, last = events(await body_of(served, answer_of_vllm()))
        assert last["error"]["code"] == "decode_lost"
        assert b"[DONE]" not in shown
        assert served.relay.outcome == "failed"
    assert set(vllm.paths()) == {DERENDER_PATH}


@pytest.mark.parametrize("handler", [answers({}, 500), breaks, answers(b"x")])
async def test_a_whole_answer_that_is_not_parsed_is_served_by_vllm(vllm: ScriptedVllm, handler: Any) -> None:
    vllm.answers = {DERENDER_PATH: handler, CHAT: answers({"own": 1})}
    async with relayed([landed(FIRST), *decoded([*REST, END])], vllm, rendered=RENDERED, **TOOLS) as served:
        assert json.loads(await body_of(served, answer_of_vllm())) == {"own": 1}
        assert served.value("anchorleg_resumed_total", reason="not_parsed", way="whole") == 1
        assert served.relay.outcome == "resumed"


@pytest.mark.parametrize("handler", [answers({}, 500), breaks, hangs])
async def test_a_stream_that_is_not_parsed_ends_with_an_error_and_frees_the_slot(vllm: ScriptedVllm, handler: Any) -> None:
    vllm.answers[DERENDER_PATH] = handler
    async with relayed([*MID_STREAM, "hang"], vllm, rendered=RENDERED, stream=True, **TOOLS) as served:
        assert events(await body_of(served, answer_of_vllm()))[-1]["error"]["code"] == "decode_lost"
        assert served.relay.outcome == "failed"
        await freed(served)


@pytest.mark.parametrize("read", [1, 2])
async def test_a_client_that_leaves_frees_the_slot(vllm: ScriptedVllm, read: int) -> None:
    vllm.answers[DERENDER_PATH] = parser()
    async with relayed([*MID_STREAM, "hang"], vllm, rendered=RENDERED, stream=True, **TOOLS) as served:
        got = await served.relay.answer(answer_of_vllm())
        for _ in range(read):
            await anext(got.chunks)
        await got.chunks.aclose()
        await freed(served)


async def test_an_answer_that_is_cancelled_while_it_is_parsed_stops_vllm(vllm: ScriptedVllm) -> None:
    vllm.answers[DERENDER_PATH] = hangs
    async with relayed([landed(FIRST), *decoded([*REST, END])], vllm, rendered=RENDERED, **TOOLS) as served:
        answering = asyncio.create_task(served.relay.answer(answer_of_vllm()))

        async def parsing() -> bool:
            return vllm.paths() == [DERENDER_PATH]

        await eventually(parsing)
        answering.cancel()
        await asyncio.wait([answering], timeout=5)
        await asyncio.wait_for(vllm.left.wait(), 1)
