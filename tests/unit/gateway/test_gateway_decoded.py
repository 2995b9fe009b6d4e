"""A daemon's stream: what this request's answer cannot have is never passed on."""

import math
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest

from gateway.decode_client import DecodeFailed
from gateway.decoded import Decoded, Prefilled
from gateway.endpoints import Endpoint
from gateway.plan import Plan, make_plan
from gateway.settings import GatewaySettings
from gateway.tokens import Batch, TokenLogprobs
from handoff import decode_pb2 as pb
from tests.kit.gateway import PROMPT, SECRET, body, card, end_id
from tests.kit.legs import landed, reserved, tokens

LENGTH, STOP = pb.Tokens.LENGTH, pb.Tokens.STOP
END, MODEL = end_id(), card()
LIMIT = 9


class Events:
    """A daemon's stream, without the daemon."""

    endpoint = "here"

    def __init__(self, *events: pb.DecodeEvent) -> None:
        self._events = list(events)
        self.waited: list[float] = []

    async def read(self, timeout_s: float) -> pb.DecodeEvent:
        self.waited.append(timeout_s)
        return self._events.pop(0)


def decoded(*events: pb.DecodeEvent, stream: Any = None, **fields: Any) -> Decoded:
    plan = make_plan(Endpoint.CHAT, body(**fields), MODEL)
    assert isinstance(plan, Plan)
    settings = GatewaySettings.load(secret=SECRET, queue_timeout_s=2, stall_timeout_s=30, landing_timeout_s=7)
    source: Any = stream or Events(*events)
    return Decoded(source, settings, plan, MODEL, LIMIT)


async def batches(*events: pb.DecodeEvent, **fields: Any) -> list[Batch]:
    async with aclosing(decoded(*events, **fields).batches()) as read:
        return [batch async for batch in read]


async def test_tokens_come_as_the_daemon_sends_them() -> None:
    assert await batches(tokens(1, 4), tokens(2, 5, 6), tokens(4, END, finish=STOP)) == [
        Batch((4,)),
        Batch((5, 6)),
        Batch((END,), "stop"),
    ]


async def test_token_two_waits_for_the_engines_turn_and_each_other_for_the_engine() -> None:
    stream = Events(landed(4), tokens(1, 5), tokens(2, END, finish=STOP))
    read = decoded(stream=stream)
    assert await read.landed(Prefilled(len(PROMPT), PROMPT[-4:], 4)) == list(PROMPT)
    async with aclosing(read.batches()) as rest:
        assert len([batch async for batch in rest]) == 2
    assert stream.waited == [7, 2, 30]


@pytest.mark.parametrize(
    "event",
    [
        landed(5),
        landed(4, PROMPT[1:]),
        landed(4, [*PROMPT, 1]),
        landed(4, [*PROMPT[:-1], PROMPT[-1] + 1]),
        landed(4, []),
        tokens(1, 4),
        reserved(),
        pb.DecodeEvent(),
    ],
)
async def test_what_vllm_did_not_send_has_not_landed(event: pb.DecodeEvent) -> None:
    with pytest.raises(DecodeFailed) as caught:
        await decoded(event).landed(Prefilled(len(PROMPT), PROMPT[-4:], 4))
    assert caught.value.code == "protocol"


EIGHT = [1, 2, 3, 4, 5, 6, 7, 8]
WRONG: dict[str, tuple[list[pb.DecodeEvent], dict[str, Any]]] = {
    "another position": ([tokens(2, 4)], {}),
    "a position again": ([tokens(1, 4), tokens(1, 4)], {}),
    "no tokens": ([tokens(1)], {}),
    "an unknown finish": ([tokens(1, 4, finish=7)], {}),
    "another event": ([landed(4)], {}),
    "nothing known": ([pb.DecodeEvent()], {}),
    "an id beyond the vocabulary": ([tokens(1, MODEL.vocab_size)], {}),
    "a stop without an id": ([tokens(1, finish=STOP)], {}),
    "a stop that is none": ([tokens(1, 4, finish=STOP)], {}),
    "a stop id that does not end": ([tokens(1, END)], {}),
    "a stop id before the end": ([tokens(1, END, 4)], {}),
    "two stop ids": ([tokens(1, END, END, finish=STOP)], {}),
    "a stop id, and the length": ([tokens(1, *EIGHT[:7], END, finish=LENGTH)], {}),
    "an end id that is ignored": ([tokens(1, END, finish=STOP)], {"ignore_eos": True}),
    "the client's stop id does not end": ([tokens(1, 7)], {"stop_token_ids": [7]}),
    "the client's stop id, ignored": ([tokens(1, 7)], {"stop_token_ids": [7], "ignore_eos": True}),
    "too many": ([tokens(1, *EIGHT, 9)], {}),
    "too many in all": ([tokens(1, *EIGHT), tokens(9, 9)], {}),
    "an end too early": ([tokens(1, 4, finish=LENGTH)], {}),
    "an end without tokens, too early": ([tokens(1, 4), tokens(2, finish=LENGTH)], {}),
}


@pytest.mark.parametrize(("events", "fields"), WRONG.values(), ids=WRONG.keys())
async def test_what_this_answer_cannot_have_is_the_daemons_failure(
    events: Sequence[pb.DecodeEvent], fields: dict[str, Any]
) -> None:
    with pytest.raises(DecodeFailed) as caught:
        await batches(*events, **fields)
    assert caught.value.code == "protocol"


async def test_the_clients_stop_ids_end_an_answer_and_the_models_do_not_where_they_are_ignored() -> None:
    fields = {"stop_token_ids": [7], "ignore_eos": True}
    assert await batches(tokens(1, END, 7, finish=STOP), **fields) == [Batch((END,)), Batch((7,), "stop")]
    assert await batches(tokens(1, 7, finish=STOP), stop_token_ids=[7]) == [Batch((7,), "stop")]


async def test_the_last_of_several_tokens_comes_alone_as_from_vllm() -> None:
    assert await batches(tokens(1, 4, 5, END, finish=STOP)) == [Batch((4, 5)), Batch((END,), "stop")]
    assert await batches(tokens(1, *EIGHT, finish=LENGTH)) == [Batch(tuple(EIGHT[:-1])), Batch((8,), "length")]


async def test_an_answer_may_be_as_long_as_it_may_and_end_with_or_without_a_token() -> None:
    assert (await batches(tokens(1, *EIGHT, finish=LENGTH)))[-1].finish == "length"
    assert (await batches(tokens(1, *EIGHT), tokens(9, finish=LENGTH)))[-1] == Batch((), "length")
    assert (await batches(tokens(1, *EIGHT[:7], END, finish=STOP)))[-1].finish == "stop"


def entry(logprob: float, *top: tuple[int, float]) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(logprob=logprob, top_ids=[token for token, _ in top], top_logprobs=[value for _, value in top])


ASKED = {"logprobs": True, "top_logprobs": 2}


async def test_logprobs_come_with_their_tokens() -> None:
    told = [entry(-0.5, (4, -0.5), (5, -1.0)), entry(-math.inf)]
    sent = tokens(1, 4, END, finish=STOP, logprobs=told)
    assert await batches(sent, **ASKED) == [
        Batch((4,), None, (TokenLogprobs(-0.5, ((4, -0.5), (5, -1.0))),)),
        Batch((END,), "stop", (TokenLogprobs(-math.inf),)),
    ]


FINE = entry(-0.5, (4, -0.5))
WRONG_LOGPROBS: dict[str, tuple[Sequence[pb.TokenLogprobs], dict[str, Any]]] = {
    "none": ([], ASKED),
    "too few": ([FINE], ASKED),
    "too many": ([FINE, FINE, FINE], ASKED),
    "not asked for": ([FINE, FINE], {}),
    "more alternatives than asked for": ([FINE, FINE], {"logprobs": True}),
    "one alternative too many": ([FINE, entry(-1, (1, -1), (2, -2), (3, -3))], ASKED),
    "ids without values": ([FINE, pb.TokenLogprobs(logprob=-1, top_ids=[1])], ASKED),
    "values without ids": ([FINE, pb.TokenLogprobs(logprob=-1, top_logprobs=[-1])], ASKED),
    "an id beyond the vocabulary": ([FINE, entry(-1, (MODEL.vocab_size, -1))], ASKED),
    "not a number": ([FINE, entry(math.nan)], ASKED),
    "an alternative's not a number": ([FINE, entry(-1, (1, math.nan))], ASKED),
    "infinite": ([FINE, entry(math.inf)], ASKED),
    "an alternative's infinite": ([FINE, entry(-1, (1, math.inf))], ASKED),
}


@pytest.mark.parametrize(("told", "fields"), WRONG_LOGPROBS.values(), ids=WRONG_LOGPROBS.keys())
async def test_logprobs_that_were_not_asked_for_or_are_none_are_the_daemons_failure(
    told: Sequence[pb.TokenLogprobs], fields: dict[str, Any]
) -> None:
    with pytest.raises(DecodeFailed, match="logprobs"):
        await batches(tokens(1, 4, 5, logprobs=told), **fields)
