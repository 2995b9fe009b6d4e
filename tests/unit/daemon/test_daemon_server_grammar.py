"""Requests with a grammar, over real gRPC: refused before they cost anything, compiled while prefill runs."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_daemon.engine.protocol import FinishReason, Step
from decode_daemon.grammar import Form, Grammars
from decode_daemon.slots import SlotState
from handoff import decode_pb2 as pb
from tests.kit.grammar import PERSON, HeldForm, held, ready, write_tokenizer
from tests.kit.handoff import comes_true
from tests.kit.streaming import ScriptedEngine, Serve, counting, event, rest

CHOICE = pb.Grammar(kind=pb.Grammar.CHOICE, source='["yes", "no"]')
SCHEMA = pb.Grammar(kind=pb.Grammar.JSON_SCHEMA, source=json.dumps(PERSON))
UNSUPPORTED = pb.Grammar(kind=pb.Grammar.JSON_SCHEMA, source='{"type": "integer", "multipleOf": 3}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(here)
    return here


@pytest.fixture
async def grammars(folder: Path) -> Grammars:
    return await ready(folder)


@pytest.fixture
def compile_now(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars are parsed as ever, and compiled once this is set."""
    compile_it = Form.compile
    with held() as go:

        def wait(form: Form, compiler: Any) -> Any:
            assert go.wait(10)
            return compile_it(form, compiler)

        monkeypatch.setattr(Form, "compile", wait)
        yield go


async def test_the_engine_is_given_the_grammar_at_the_answers_beginning(serve: Serve, grammars: Grammars) -> None:
    engine = ScriptedEngine(counting(1))
    server = await serve(engine, grammars=grammars)
    assert (await rest(await server.landed(grammar=CHOICE, ending_token_ids=[7])))[-1].tokens.finish == pb.Tokens.LENGTH
    given, fresh = engine.asked[0].constraint, await grammars.constraint(Form.of(CHOICE), [7])
    assert given is not None
    first, expected = given.mask(), fresh.mask()
    assert first is not None
    assert expected is not None
    assert torch.equal(first, expected)


async def test_a_grammar_that_is_not_served_is_refused_before_its_slot_is_reserved_and_frees_it_at_once(
    serve: Serve, grammars: Grammars
) -> None:
    server = await serve(ScriptedEngine(counting(1)), grammars=grammars)
    (refusal,) = await rest(server.decode(grammar=UNSUPPORTED))
    assert refusal.failed.code == "grammar_unsupported"
    assert refusal.failed.message == "xgrammar does not hold an answer to this JSON schema: multipleOf"
    await server.all_free()
    assert server.freed == [(0, 1)]
    assert server.ended("grammar_unsupported") == 1
    assert (await rest(await server.landed(grammar=CHOICE)))[-1].tokens.finish == pb.Tokens.LENGTH


async def test_a_daemon_without_grammars_refuses_them(serve: Serve) -> None:
    server = await serve(ScriptedEngine(counting(1)))
    (refusal,) = await rest(server.decode(grammar=CHOICE))
    assert (refusal.failed.code, refusal.failed.message) == ("grammar_unsupported", "this daemon serves no grammars")
    await server.all_free()


async def test_a_daemon_at_work_on_other_grammars_refuses_for_now_before_its_slot_is_reserved(
    serve: Serve, grammars: Grammars
) -> None:
    server = await serve(ScriptedEngine(counting(1)), grammars=grammars)
    forms = [HeldForm(pb.Grammar.CHOICE, f'["{number}"]') for number in range(4)]
    with held():
        others = [asyncio.create_task(grammars.constraint(form, [])) for form in forms]
        await comes_true(lambda: len(grammars._compiling) == 4)
        (refusal,) = await rest(server.decode(grammar=CHOICE))
    assert refusal.failed.code == "grammar_busy"
    await server.all_free()
    assert server.ended("grammar_busy") == 1
    await asyncio.gather(*others)
    assert (await rest(await server.landed(grammar=CHOICE)))[-1].tokens.finish == pb.Tokens.LENGTH


async def test_reserving_and_landing_wait_for_no_grammar_but_decoding_does(
    serve: Serve, grammars: Grammars, compile_now: threading.Event
) -> None:
    engine = ScriptedEngine(counting(2))
    server = await serve(engine, grammars=grammars)
    call = await server.landed(grammar=CHOICE)  # both are told while the grammar waits
    first = asyncio.create_task(event(call))
    await comes_true(lambda: server.slots[0].state is SlotState.LANDED)
    assert not engine.asked
    compile_now.set()
    assert list((await first).tokens.ids) == [0, 1]
    assert engine.asked[0].constraint is not None
    await server.all_free()


async def test_a_grammar_is_compiled_while_nothing_has_landed(serve: Serve, folder: Path) -> None:
    compiled = threading.Event()
    grammars = await ready(folder, compiled=lambda _: compiled.set())
    server = await serve(ScriptedEngine(counting(1)), grammars=grammars)
    call = server.decode(grammar=SCHEMA)
    assert (await event(call)).HasField("reserved")
    assert await asyncio.to_thread(compiled.wait, 5)
    server.land()
    assert (await rest(call))[-1].tokens.finish == pb.Tokens.LENGTH


async def test_a_grammar_that_cannot_be_compiled_is_told_before_anything_has_landed(
    serve: Serve, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(form: Form, compiler: Any) -> Any:
        raise RuntimeError("[22:26:55] /project/cpp/compiler.cc:83: too\nlarge")

    monkeypatch.setattr(Form, "compile", fail)
    server = await serve(ScriptedEngine(counting(1)), grammars=grammars)
    reserved, failed = await rest(server.decode(grammar=CHOICE))
    assert reserved.HasField("reserved")
    assert (failed.failed.code, failed.failed.message) == ("grammar_failed", "the grammar cannot be compiled: too large")
    await server.all_free()
    assert server.ended("grammar_failed") == 1


async def test_an_answer_that_could_go_on_waits_so_long_for_its_grammar_and_no_longer(
    serve: Serve, folder: Path, compile_now: threading.Event
) -> None:
    server = await serve(ScriptedEngine(counting(1)), grammars=await ready(folder, wait_s=0.1))
    (failed,) = await rest(await server.landed(grammar=CHOICE))
    assert failed.failed.code == "grammar_failed"
    assert failed.failed.message == "the grammar was not compiled 0.1 s after the KV cache was there"
    await server.all_free()


async def test_a_handoff_that_fails_while_a_grammar_is_compiled_is_told_at_once(
    serve: Serve, grammars: Grammars, compile_now: threading.Event
) -> None:
    server = await serve(ScriptedEngine(counting(1)), grammars=grammars)
    call = server.decode(grammar=CHOICE)
    assert (await event(call)).HasField("reserved")
    server.slots[0].abort(b"scheduler", "h1", 1, "preempted", writing=False)
    (failed,) = await rest(call)
    assert failed.failed.code == "handoff_failed"
    await server.all_free()


@pytest.mark.parametrize("landed", [False, True])
async def test_a_client_that_leaves_while_its_grammar_is_compiled_frees_its_slot_at_once(
    serve: Serve, grammars: Grammars, compile_now: threading.Event, landed: bool
) -> None:
    engine = ScriptedEngine(counting(1))
    server = await serve(engine, grammars=grammars)
    if landed:
        call = await server.landed(grammar=CHOICE)
    else:
        call = server.decode(grammar=CHOICE)
        assert (await event(call)).HasField("reserved")
    call.cancel()
    await server.all_free()
    assert server.ended("cancelled") == 1
    compile_now.set()
    assert (await rest(await server.landed(grammar=CHOICE)))[-1].tokens.finish == pb.Tokens.LENGTH
    assert len(engine.asked) == 1


async def test_a_first_token_that_ends_the_answer_waits_for_no_grammar(
    serve: Serve, grammars: Grammars, compile_now: threading.Event
) -> None:
    server = await serve(ScriptedEngine(counting(1)), grammars=grammars)
    call = server.decode(grammar=CHOICE)
    assert (await event(call)).HasField("reserved")
    server.land(finished=True)
    assert (await rest(call))[-1].tokens.finish == pb.Tokens.STOP
    await server.all_free()


async def test_two_requests_with_the_same_schema_compile_it_once(
    serve: Serve, folder: Path, compile_now: threading.Event
) -> None:
    compiled: list[float] = []
    grammars = await ready(folder, compiled=compiled.append)
    engine = ScriptedEngine(counting(1))
    server = await serve(engine, grammars=grammars)
    calls = [await server.landed(slot, grammar=SCHEMA) for slot in (0, 1)]
    compile_now.set()
    for call in calls:
        assert (await rest(call))[-1].tokens.finish == pb.Tokens.LENGTH
    assert len(compiled) == 1
    first, second = (asked.constraint for asked in engine.asked)
    assert first is not second


async def test_a_token_that_the_grammar_has_no_place_for_is_an_engine_that_fails(serve: Serve, grammars: Grammars) -> None:
    def script(cancelled: Callable[[], bool]) -> Iterator[Step]:
        constraint = engine.asked[-1].constraint
        assert constraint is not None
        mask = constraint.mask()
        assert mask is not None
        constraint.accept(int((~mask).nonzero()[0]))
        yield Step((1,), FinishReason.STOP)

    engine = ScriptedEngine(script)
    server = await serve(engine, grammars=grammars)
    (failed,) = await rest(await server.landed(grammar=CHOICE))
    assert failed.failed.code == "engine_failed"
    assert "the grammar has no place for token" in failed.failed.message
    await server.all_free()
