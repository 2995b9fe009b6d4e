"""What a request asks of the engine, over real gRPC: each field arrives as it was sent, and what is too large is refused."""

from collections.abc import Iterator
from typing import Any

import pytest

from decode_daemon.engine.protocol import DecodeParams, FinishReason, SamplingParams, Step, TokenLogprobs
from handoff import decode_pb2 as pb
from tests.kit.handoff import MODEL
from tests.kit.streaming import TOKENS, ScriptedEngine, Serve, counting, event, rest

ROOM = MODEL.context_tokens - TOKENS


@pytest.mark.parametrize(
    ("fields", "max_tokens", "seed"),
    [
        ({"max_tokens": 5, "seed": 0}, 5, 0),
        ({"max_tokens": 5, "seed": -(2**63)}, 5, -(2**63)),
        ({"max_tokens": 0}, ROOM, None),  # the rest of the context
        ({"max_tokens": 10_000}, ROOM, None),
    ],
)
async def test_the_engine_is_asked_for_what_the_request_says(
    serve: Serve, fields: dict[str, Any], max_tokens: int, seed: int | None
) -> None:
    engine = ScriptedEngine(counting(1))
    server = await serve(engine)
    wishes = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_token_ids": [2, 3]}
    await rest(await server.landed(**wishes | fields))
    await server.all_free()
    assert engine.asked == [DecodeParams(SamplingParams(0.5, 0.9, 7, seed=seed), max_tokens, frozenset({2, 3}))]


async def test_every_sampling_field_reaches_the_engine(serve: Serve) -> None:
    engine = ScriptedEngine(counting(1))
    server = await serve(engine)
    fields = {
        "max_tokens": 30,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 40,
        "seed": 11,
        "stop_token_ids": [9, 2],
        "min_p": 0.05,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.125,
        "logit_bias": {4: -100.0, 0: 2.5},
        "allowed_token_ids": [0, 4, 8],
        "bad_words": [pb.TokenIds(ids=[5, 6]), pb.TokenIds(ids=[7])],
        "min_tokens": 12,
        "ending_token_ids": [2, 9, 9],
        "logprobs": 0,
        "answered": 3,
    }
    await rest(await server.landed(**fields))
    (asked,) = engine.asked
    assert asked == DecodeParams(
        sampling=SamplingParams(
            temperature=0.7,
            top_p=0.8,
            top_k=40,
            min_p=0.05,
            seed=11,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            repetition_penalty=1.125,
            logit_bias={4: -100.0, 0: 2.5},
            allowed_token_ids=(0, 4, 8),
            bad_words=((5, 6), (7,)),
            min_tokens=12,
            ending_token_ids=frozenset({2, 9}),
            logprobs=0,
        ),
        max_tokens=30,
        stop_token_ids=frozenset({2, 9}),
        constraint=None,
        answered=3,
    )


async def test_logprobs_travel_with_their_tokens(serve: Serve) -> None:
    steps = [
        Step((4, 5), None, (TokenLogprobs(-0.5, (4, 1), (-0.5, -1.25)), TokenLogprobs(-2.0, (1, 5), (-1.5, -2.0)))),
        Step((6,), FinishReason.STOP, (TokenLogprobs(float("-inf"), (), ()),)),
    ]

    def script(cancelled: Any) -> Iterator[Step]:
        yield from steps

    server = await serve(ScriptedEngine(script))
    first, last = [one.tokens for one in await rest(await server.landed(logprobs=2))]
    told = [(one.logprob, list(one.top_ids), list(one.top_logprobs)) for one in first.logprobs]
    assert told == [(-0.5, [4, 1], [-0.5, -1.25]), (-2.0, [1, 5], [-1.5, -2.0])]
    assert [(one.logprob, list(one.top_ids)) for one in last.logprobs] == [(float("-inf"), [])]


async def test_no_logprobs_are_told_where_none_are_asked_for(serve: Serve) -> None:
    server = await serve(ScriptedEngine(counting(2)))
    (step,) = await rest(await server.landed())
    assert not step.tokens.logprobs


MANY = [1] * 300_000


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"logprobs": 101}, "logprobs is 101; at most 100"),
        ({"logprobs": 2**32 - 1}, "at most 100"),
        ({"allowed_token_ids": MANY, "stop_token_ids": MANY}, "names 600000 token ids"),
        ({"bad_words": [pb.TokenIds(ids=MANY), pb.TokenIds(ids=MANY)]}, "names 600000 token ids"),
        ({"logit_bias": dict.fromkeys(range(150_000), 1.0), "ending_token_ids": [1] * 400_000}, "names 550000 token ids"),
    ],
)
async def test_what_is_too_large_is_refused_before_anything_is_prefilled_and_frees_its_slot(
    serve: Serve, fields: dict[str, Any], sentence: str
) -> None:
    server = await serve(ScriptedEngine(counting(1)))
    (refusal,) = await rest(server.decode(**fields))
    assert refusal.failed.code == "bad_request"
    assert sentence in refusal.failed.message
    await server.all_free()
    assert server.freed == [(0, 1)]
    assert server.ended("bad_request") == 1
    assert (await rest(await server.landed()))[-1].tokens.finish == pb.Tokens.LENGTH


async def test_a_grammar_that_is_too_large_is_left_to_vllm(serve: Serve) -> None:
    server = await serve(ScriptedEngine(counting(1)))
    (refusal,) = await rest(server.decode(grammar=pb.Grammar(kind=pb.Grammar.REGEX, source="a" * (1 << 20))))
    assert refusal.failed.code == "grammar_unsupported"
    assert refusal.failed.message.endswith("bytes; at most 1048576 are taken")
    await server.all_free()
    assert server.freed == [(0, 1)]
    assert server.ended("grammar_unsupported") == 1


async def test_an_answer_longer_than_the_prompt_that_holds_it_is_refused_once_that_is_known(serve: Serve) -> None:
    engine = ScriptedEngine(counting(1))
    server = await serve(engine)
    (refusal,) = await rest(await server.landed(answered=TOKENS + 1))
    assert (refusal.failed.code, refusal.failed.message) == (
        "bad_request",
        f"answered is {TOKENS + 1}; the prompt that landed has {TOKENS} ids",
    )
    await server.all_free()
    assert not engine.asked
    call = server.decode(answered=TOKENS)
    assert (await event(call)).HasField("reserved")
    server.land()
    assert (await rest(call))[-1].tokens.finish == pb.Tokens.LENGTH
