"""Structured output and logprobs from a whole daemon: real engine, real grammar library, real streams."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from decode_daemon.daemon import running
from gateway.decode_client import DecodeClient, DecodeFailed
from handoff import decode_pb2 as pb
from handoff.claim import to_bytes
from handoff.decode_pb2_grpc import DecoderStub
from leases import LeaseTable
from tests.kit.daemon import PROMPT, DaemonLane, Reference, Running, read, settings
from tests.kit.grammar import LETTERS, HeldForm, held, write_letters
from tests.kit.handoff import comes_true
from tests.kit.valkey import ValkeyProcess

END = LETTERS.index("<end>")
CHOICE = pb.Grammar(kind=pb.Grammar.CHOICE, source='["maybe", "yes"]')


@pytest.fixture(scope="module")
def model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, whose ids are letters here."""
    folder = tmp_path_factory.mktemp("letters")
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(model_dir / name)
    write_letters(folder)
    return folder


@pytest.fixture
async def here(lane: Running) -> DaemonLane:
    """A daemon that has read its tokenizer."""
    daemon_lane, _ = lane
    await daemon_lane.daemon.grammars.ready()
    return daemon_lane


def begun_with(reference: Reference, text: str) -> Reference:
    return replace(reference, first_token=LETTERS.index(text))


def text_of(ids: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in ids)


async def decoded(here: DaemonLane, reference: Reference, **fields: Any) -> list[int]:
    grant = await here.grant()
    call = here.decode(grant, ending_token_ids=[END], stop_token_ids=[END], **fields)
    await read(call, "reserved")
    return await here.served(grant, call, reference)


async def test_an_answer_goes_on_as_its_grammar_wants_from_the_handed_over_token_on(
    here: DaemonLane, reference: Reference
) -> None:
    assert text_of(await decoded(here, begun_with(reference, "m"), grammar=CHOICE)) == "aybe<end>"
    assert text_of(await decoded(here, begun_with(reference, "y"), grammar=CHOICE, temperature=1.5)) == "es<end>"


async def test_an_answer_that_another_engine_began_goes_on_in_its_grammar(here: DaemonLane, reference: Reference) -> None:
    assert LETTERS[PROMPT[-1]] == "m"
    assert text_of(await decoded(here, begun_with(reference, "a"), grammar=CHOICE, answered=1)) == "ybe<end>"


async def test_a_schema_holds_whatever_the_model_would_rather_say(here: DaemonLane, reference: Reference) -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "minItems": 3, "maxItems": 3}
    grammar = pb.Grammar(kind=pb.Grammar.JSON_SCHEMA, source=json.dumps(schema))
    whitespace = {LETTERS.index(letter): -100.0 for letter in " \n"}  # of which the grammar allows as much as one likes
    for seed in range(5):
        fields = {"grammar": grammar, "temperature": 1.0, "seed": seed, "logit_bias": whitespace, "max_tokens": 40}
        text = text_of(await decoded(here, begun_with(reference, "["), **fields))
        assert text.endswith("<end>")
        items = json.loads("[" + text.removesuffix("<end>"))
        assert len(items) == 3
        assert all(10 <= item <= 99 for item in items)


async def test_a_first_token_outside_of_the_grammar_is_told_as_an_engine_that_fails(
    here: DaemonLane, reference: Reference
) -> None:
    grant = await here.grant()
    call = here.decode(grant, grammar=CHOICE, ending_token_ids=[END])
    await read(call, "reserved")
    await here.hand_over(grant, begun_with(reference, "q"))
    await read(call, "landed")
    failed = await read(call, "failed")
    assert failed.code == "engine_failed"
    assert f"no place for token {LETTERS.index('q')}" in failed.message


async def test_each_token_comes_with_the_logprobs_that_were_asked_for(here: DaemonLane, reference: Reference) -> None:
    grant = await here.grant()
    ids: list[int] = []
    call = here.decode(grant, max_tokens=6, logprobs=3)
    await read(call, "reserved")
    await here.hand_over(grant, reference)
    await read(call, "landed")
    while len(ids) < 5:
        step = await read(call, "tokens")
        assert len(step.logprobs) == len(step.ids)
        for token, told in zip(step.ids, step.logprobs, strict=True):
            assert told.top_ids[0] == token  # greedy
            assert told.logprob == told.top_logprobs[0]
            assert list(told.top_logprobs) == sorted(told.top_logprobs, reverse=True)
            assert len(told.top_ids) == len(told.top_logprobs) == 3
        ids += step.ids
    assert ids == reference.tokens[:5]


async def test_what_grammars_cost_is_counted(here: DaemonLane, reference: Reference) -> None:
    await decoded(here, begun_with(reference, "y"), grammar=CHOICE)
    url = f"http://127.0.0.1:{here.daemon.metrics_port}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    assert "anchorleg_grammar_compile_seconds_count 1.0" in text


async def refused(here: DaemonLane, client: DecodeClient, **fields: Any) -> str:
    """The code that a gateway is told."""
    grant = await here.grant()
    claim = here.claim(grant)
    request = pb.DecodeRequest(
        handoff_id=claim.claim.handoff_id, slot=grant.slot, epoch=grant.epoch, claim=to_bytes(claim), **fields
    )
    with pytest.raises(DecodeFailed) as failure:
        await client.reserve(grant.decode_endpoint, request, 5)
    return failure.value.code


async def test_a_gateway_tells_a_daemon_that_is_busy_from_one_that_takes_no_such_request(here: DaemonLane) -> None:
    grammars = here.daemon.grammars
    async with DecodeClient() as client:
        assert await refused(here, client, logprobs=101) == "bad_request"
        with held():
            others = [grammars.constraint(HeldForm(pb.Grammar.CHOICE, f'["{number}"]'), []) for number in range(4)]
            waiting = [asyncio.create_task(other) for other in others]
            await comes_true(lambda: len(grammars._compiling) == 4)
            assert await refused(here, client, grammar=CHOICE) == "grammar_busy"
        await asyncio.gather(*waiting)


@pytest.fixture
def mistral_dir(model_dir: Path, tmp_path: Path) -> Path:
    """A model whose tokenizer vLLM reads with another library."""
    for file in model_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    for name in ("tekken.json", "consolidated.safetensors"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture
async def without_grammars(mistral_dir: Path, valkey: ValkeyProcess, table: LeaseTable) -> AsyncIterator[DaemonLane]:
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(running(settings(mistral_dir, valkey)))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(daemon.node.decode_endpoint))
        yield DaemonLane(daemon, DecoderStub(channel), table)


async def test_a_daemon_that_cannot_read_its_tokenizer_refuses_grammars_and_serves_the_rest(
    without_grammars: DaemonLane,
) -> None:
    refusal = await read(without_grammars.decode(await without_grammars.grant(), grammar=CHOICE), "failed")
    assert refusal.code == "grammar_unsupported"
    assert "mistral-common" in refusal.message
    assert "/" not in refusal.message
    grant, call = await without_grammars.reserved()
    call.cancel()
    assert grant.node_id == without_grammars.daemon.node.node_id
