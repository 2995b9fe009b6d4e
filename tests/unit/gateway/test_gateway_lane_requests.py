"""What a daemon is asked, on both endpoints, and what the gateway's settings and vLLM's own make of a request."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from gateway.endpoints import Endpoint
from gateway.errors import BadRequest, LaneUnavailable
from gateway.lane import Plain, Prefill, Refusal
from gateway.serving import read_handed_over
from gateway.slo import SloClass, Wish
from handoff import decode_pb2 as pb
from handoff.decode_pb2 import DecodeRequest
from tests.kit.gateway import MODEL, PROMPT, body, card_message, end_id, handed_over, ids_of
from tests.kit.legs import ScriptedDaemon, ScriptedVllm, Step, answers, failed, reserved
from tests.kit.rig import Rig, rig
from tests.kit.valkey import eventually

ALLOW, DENY = Wish(SloClass.LATENCY, fallback=True), Wish(SloClass.LATENCY, fallback=False)
WILLING: tuple[Step, ...] = (reserved(), "hang")
END = end_id()


@pytest.fixture
async def daemon(redis_url: str) -> AsyncIterator[ScriptedDaemon]:
    async with ScriptedDaemon(WILLING).registered(redis_url) as registered:
        yield registered


@pytest.fixture
async def lane(redis_url: str, vllm: ScriptedVllm, daemon: ScriptedDaemon) -> AsyncIterator[Rig]:
    async with rig(redis_url, vllm) as made:
        yield made


async def asked(
    lane: Rig, daemon: ScriptedDaemon, endpoint: Endpoint = Endpoint.CHAT, wish: Wish = ALLOW, **fields: Any
) -> DecodeRequest:
    """What the daemon is asked for this request."""
    ask = lane.decide if endpoint is Endpoint.CHAT else lane.decide_completion
    decision = await ask(wish, **fields)
    assert isinstance(decision, Prefill), decision
    assert decision.plan.endpoint is endpoint
    decision.stream.cancel()
    await all_free(lane)
    return daemon.requests[-1]


async def all_free(lane: Rig, slots: int = 1) -> None:
    async def free() -> bool:
        return await lane.free_slots() == slots

    await eventually(free, within_s=1)


async def test_a_daemon_speculates_as_it_is_set_unless_a_request_wants_none(lane: Rig, daemon: ScriptedDaemon) -> None:
    assert (await asked(lane, daemon)).speculation == DecodeRequest.AS_SET
    assert (await asked(lane, daemon, wish=replace(ALLOW, speculate=False))).speculation == DecodeRequest.OFF


async def test_a_plain_request_asks_for_nothing_but_tokens(lane: Rig, daemon: ScriptedDaemon) -> None:
    decode = await asked(lane, daemon, max_tokens=9)
    assert (decode.max_tokens, decode.answered, decode.temperature, decode.top_p, decode.top_k) == (9, 0, 1, 1, 0)
    assert (decode.min_p, decode.presence_penalty, decode.frequency_penalty, decode.repetition_penalty) == (0, 0, 0, 1)
    assert (list(decode.stop_token_ids), list(decode.ending_token_ids)) == ([END], [END])
    assert not decode.logit_bias
    assert not decode.allowed_token_ids
    assert not decode.bad_words
    assert not any(decode.HasField(field) for field in ("seed", "logprobs", "grammar"))


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_every_sampling_field_reaches_the_daemon(lane: Rig, daemon: ScriptedDaemon, endpoint: Endpoint) -> None:
    word = "Paris"
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": 3} if endpoint is Endpoint.CHAT else {"logprobs": 3}
    decode = await asked(
        lane,
        daemon,
        endpoint,
        max_tokens=40,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=-3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"5": 1.5, "6": -200},
        allowed_token_ids=[4, 5, 6],
        bad_words=[word],
        min_tokens=2,
        stop_token_ids=[9, 8],
        **logprobs,
    )
    assert (decode.temperature, decode.top_p, decode.top_k, decode.min_p, decode.seed) == (0.5, 0.25, 7, 0.125, -3)
    assert (decode.presence_penalty, decode.frequency_penalty, decode.repetition_penalty) == (0.5, -0.5, 1.5)
    assert dict(decode.logit_bias) == {5: 1.5, 6: -100}
    assert list(decode.allowed_token_ids) == [4, 5, 6]
    assert ids_of(word) in [list(words.ids) for words in decode.bad_words]
    assert (decode.min_tokens, decode.logprobs) == (2, 3)
    assert list(decode.stop_token_ids) == sorted([8, 9, END])
    assert list(decode.ending_token_ids) == sorted([8, 9, END])


async def test_logprobs_without_alternatives_are_asked_for(lane: Rig, daemon: ScriptedDaemon) -> None:
    decode = await asked(lane, daemon, logprobs=True)
    assert decode.HasField("logprobs")
    assert decode.logprobs == 0


async def test_ids_that_are_ignored_end_nothing_and_are_withheld_all_the_same(lane: Rig, daemon: ScriptedDaemon) -> None:
    decode = await asked(lane, daemon, ignore_eos=True, stop_token_ids=[8], min_tokens=2)
    assert (list(decode.stop_token_ids), list(decode.ending_token_ids)) == ([8], sorted([8, END]))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, pb.Grammar.JSON_OBJECT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            pb.Grammar.JSON_SCHEMA,
        ),
        ({"structured_outputs": {"regex": "[0-9]+"}}, pb.Grammar.REGEX),
        ({"structured_outputs": {"choice": ["a", "b"]}}, pb.Grammar.CHOICE),
    ],
)
async def test_a_grammar_reaches_the_daemon(lane: Rig, daemon: ScriptedDaemon, fields: dict[str, Any], kind: Any) -> None:
    decode = await asked(lane, daemon, **fields)
    assert decode.grammar.kind == kind
    if kind == pb.Grammar.JSON_SCHEMA:
        assert json.loads(decode.grammar.source) == SCHEMA


async def test_a_grammar_that_a_daemon_does_not_know_is_vllms_and_no_other_daemon_is_asked(
    redis_url: str, vllm: ScriptedVllm
) -> None:
    refuses = (failed("grammar_unsupported", "a schema with $dynamicRef"),)
    one, other = ScriptedDaemon(refuses), ScriptedDaemon(refuses)
    fields = {"response_format": {"type": "json_object"}}
    async with one.registered(redis_url), other.registered(redis_url), rig(redis_url, vllm) as made:
        assert await made.decide(ALLOW, **fields) == Plain("unsupported_grammar")
        assert len(one.requests) + len(other.requests) == 1
        refused = await made.decide(DENY, **fields)
        assert isinstance(refused, Refusal)
        assert isinstance(refused.error, BadRequest)
        assert (refused.error.code, refused.error.param) == ("unsupported_grammar", "response_format")
        assert "$dynamicRef" in refused.error.message
        assert "127.0.0.1" not in refused.error.message, "a client has no business with a daemon's address"
        await all_free(made, slots=2)


class TestCompletions:
    async def test_a_prompt_of_ids_is_as_long_as_it_is(self, lane: Rig, daemon: ScriptedDaemon) -> None:
        most = 4096 - 1  # the answer's nine tokens are cut down to one, as vLLM does
        assert (await asked(lane, daemon, Endpoint.COMPLETIONS, prompt=[1] * most)).max_tokens == 9
        assert await lane.decide_completion(ALLOW, prompt=[1] * (most + 1)) == Plain("too_long")
        assert lane.vllm.asked == []

    async def test_a_text_of_which_the_bounds_do_not_tell_is_counted(self, lane: Rig, daemon: ScriptedDaemon) -> None:
        lane.vllm.answers["/tokenize"] = answers({"tokens": [1] * 4000})
        await asked(lane, daemon, Endpoint.COMPLETIONS, prompt=["x" * 4000])
        (counted,) = lane.vllm.asked
        assert counted.json() == {"model": MODEL, "prompt": "x" * 4000}

    async def test_without_a_limit_it_is_openais(self, lane: Rig, daemon: ScriptedDaemon) -> None:
        assert (await asked(lane, daemon, Endpoint.COMPLETIONS, max_tokens=None)).max_tokens == 16

    async def test_a_prompt_beyond_the_vocabulary_is_vllms_to_refuse(self, lane: Rig) -> None:
        assert await lane.decide_completion(ALLOW, prompt=[100_000]) == Plain("unsupported_prompt")

    async def test_the_prefill_leg_gets_the_prompt_as_it_came(self, lane: Rig) -> None:
        decision = await lane.decide_completion(ALLOW, prompt=list(PROMPT))
        assert isinstance(decision, Prefill)
        assert json.loads(decision.body)["prompt"] == list(PROMPT)
        decision.stream.cancel()


class TestServerFlags:
    """vLLM's own flags, mirrored in the gateway's settings."""

    @pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
    async def test_usage_that_vllm_always_tells_is_told_in_each_chunk(
        self, redis_url: str, vllm: ScriptedVllm, daemon: ScriptedDaemon, options: Any
    ) -> None:
        async with rig(redis_url, vllm, force_include_usage=True) as made:
            decision = await made.decide(ALLOW, stream=True, stream_options=options)
            assert isinstance(decision, Prefill)
            assert (decision.plan.form.include_usage, decision.plan.form.continuous_usage) == (True, True)
            decision.stream.cancel()

    @pytest.mark.parametrize(("asked_for", "shown"), [(None, True), (True, True), (False, False)])
    async def test_tokens_that_vllm_always_names_by_id_are_named_so_unless_the_client_says_no(
        self, redis_url: str, vllm: ScriptedVllm, daemon: ScriptedDaemon, asked_for: bool | None, shown: bool
    ) -> None:
        async with rig(redis_url, vllm, return_tokens_as_token_ids=True) as made:
            decision = await made.decide(ALLOW, return_tokens_as_token_ids=asked_for)
            assert isinstance(decision, Prefill)
            assert decision.plan.form.tokens_as_ids is shown
            decision.stream.cancel()

    async def test_without_the_flags_a_request_says_it_all(self, lane: Rig) -> None:
        decision = await lane.decide(ALLOW, stream=True)
        assert isinstance(decision, Prefill)
        form = decision.plan.form
        assert not any((form.include_usage, form.continuous_usage, form.tokens_as_ids))
        decision.stream.cancel()


class TestReasoning:
    async def test_where_vllm_has_a_parser_that_the_lane_has_not_chats_are_vllms(
        self, redis_url: str, vllm: ScriptedVllm, daemon: ScriptedDaemon
    ) -> None:
        async with rig(redis_url, vllm, reasoning="plain") as made:
            assert await made.decide(ALLOW) == Plain("reasoning_parser")
            served = await made.decide_completion(ALLOW)
            assert isinstance(served, Prefill)
            served.stream.cancel()

    async def test_a_grammar_after_reasoning_is_vllms(self, redis_url: str, vllm: ScriptedVllm, daemon: ScriptedDaemon) -> None:
        async with rig(redis_url, vllm, reasoning="plain") as made:
            decision = await made.decide_completion(ALLOW, response_format={"type": "json_object"})
            assert isinstance(decision, Plain)
            assert decision.reason.startswith("unsupported_response_format")


class TestConfiguredOtherwise:
    async def test_what_vllm_does_otherwise_is_known_before_a_slot_is_taken(self, lane: Rig, daemon: ScriptedDaemon) -> None:
        served = await lane.decide(ALLOW)
        assert isinstance(served, Prefill)
        serving = read_handed_over({"kv_transfer_params": handed_over(5, defaults={"temperature": 0.5})}).serving
        assert lane.parts.servings.judge(serving, served.plan, served.original, served.card)
        served.stream.cancel()
        assert await lane.decide(ALLOW) == Plain("vllm_configured_otherwise")
        refused = await lane.decide(DENY)
        assert isinstance(refused, Refusal)
        assert isinstance(refused.error, LaneUnavailable)
        assert "temperature" in refused.error.message
        assert len(daemon.requests) == 1
        await all_free(lane)
        await asked(lane, daemon, temperature=1)  # what says all by itself is still the lane's

    async def test_a_card_with_the_same_defaults_is_no_difference(self, redis_url: str, vllm: ScriptedVllm) -> None:
        daemon = ScriptedDaemon(WILLING, card=card_message(temperature=0.5))
        async with daemon.registered(redis_url), rig(redis_url, vllm) as made:
            served = await made.decide(ALLOW)
            assert isinstance(served, Prefill)
            serving = read_handed_over({"kv_transfer_params": handed_over(5, defaults={"temperature": 0.5})}).serving
            assert made.parts.servings.judge(serving, served.plan, body(), served.card) is None
            served.stream.cancel()
