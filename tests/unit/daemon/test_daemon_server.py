"""The token stream over real gRPC, with an engine that does what the test says."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc.aio
import pytest
import torch

from decode_daemon.engine.protocol import EngineError, FinishReason, Step
from decode_daemon.slots import SlotState
from handoff import decode_pb2 as pb
from tests.kit.handoff import BLOCK, FIRST_TOKEN, MODEL, comes_true
from tests.kit.streaming import CARD, TOKENS, Endless, ScriptedEngine, Serve, Server, counting, event, rest


async def test_a_request_is_told_each_stage_and_each_step_once(serve: Serve) -> None:
    engine = ScriptedEngine(counting(1, 3, 2, 1))
    server = await serve(engine)
    call = server.decode()
    assert (await event(call)).HasField("reserved")
    memory = server.land()
    landed = (await event(call)).landed
    assert list(landed.prompt_token_ids) == list(range(TOKENS))
    assert (landed.first_token, landed.bytes, landed.transfer_seconds) == (FIRST_TOKEN, memory.numel() * 4, 0.5)
    steps = [one.tokens for one in await rest(call)]
    assert [list(step.ids) for step in steps] == [[0], [1, 2, 3], [4, 5], [6]]
    assert [step.position for step in steps] == [1, 2, 5, 7]
    assert [step.finish for step in steps] == [pb.Tokens.NONE] * 3 + [pb.Tokens.LENGTH]
    await server.all_free()
    await comes_true(lambda: server.freed == [(0, 1)])
    assert server.ended("finished") == 1
    assert server.metrics.registry.get_sample_value("anchorleg_decode_tokens_total") == 7
    # Token-major blocks: the first token's keys of layer 0 are the first elements that landed.
    assert torch.equal(engine.seen[0][:, 0].flatten(), memory[: BLOCK.kv_heads * BLOCK.head_dim])


async def test_a_first_token_that_ends_the_answer_asks_nothing_of_the_engine(serve: Serve) -> None:
    engine = ScriptedEngine(counting(1))
    server = await serve(engine)
    call = server.decode()
    assert (await event(call)).HasField("reserved")
    server.land(finished=True)
    last = (await rest(call))[-1].tokens
    assert (last.position, list(last.ids), last.finish) == (1, [], pb.Tokens.STOP)
    assert not engine.asked
    await server.all_free()


async def test_the_card_is_described(serve: Serve) -> None:
    server = await serve(ScriptedEngine(counting(1)))
    assert await server.stub.Describe(pb.DescribeRequest()) == CARD


@pytest.mark.parametrize(
    ("request_of", "code"),
    [
        (lambda server: server.decode(slot=2), "no_such_slot"),
        (lambda server: server.decode(epoch=7), "slot_busy"),
        (lambda server: server.decode(slot=1, epoch=3), "stale_epoch"),
    ],
)
async def test_a_request_without_a_right_to_its_slot_is_refused_with_a_code(
    serve: Serve, request_of: Callable[[Server], Any], code: str
) -> None:
    server = await serve(ScriptedEngine(counting(1)))
    server.slots[1].raise_floor(3)
    holder = server.decode(epoch=5)
    assert (await event(holder)).HasField("reserved")
    (refusal,) = await rest(request_of(server))
    assert refusal.failed.code == code
    assert server.ended("refused") == 1
    server.epochs = 5
    server.land()
    assert (await rest(holder))[-1].tokens.finish == pb.Tokens.LENGTH  # the holder is not disturbed


async def test_a_refusal_that_nobody_reads_is_no_error(serve: Serve) -> None:
    class Gone:
        async def write(self, _: object) -> None:
            raise grpc.aio.UsageError("the call is over")

    server = await serve(ScriptedEngine(counting(1)))
    await server.service.Decode(pb.DecodeRequest(slot=2), Gone())
    assert server.ended("refused") == 1


async def test_what_the_engine_owes_is_known_from_the_reservation_on_and_falls_with_each_token(serve: Serve) -> None:
    script = Endless(paced=True)
    server = await serve(ScriptedEngine(script))
    first = await server.landed(0, max_tokens=30)
    waiting = server.decode(1, max_tokens=0)
    assert (await event(waiting)).HasField("reserved")
    assert [slot.owed for slot in server.slots] == [29, MODEL.context_tokens]  # the first token is prefill's
    script.pace.release(3)
    for left in (28, 27, 26):
        assert (await event(first)).HasField("tokens")
        await comes_true(lambda left=left: server.slots[0].owed <= left)  # type: ignore[misc]
    assert server.slots[0].owed == 26
    first.cancel()
    waiting.cancel()
    await server.all_free()
    assert [slot.owed for slot in server.slots] == [0, 0]
    await comes_true(lambda: server.service.served == 2)


async def test_a_client_that_leaves_before_its_kv_has_landed_frees_the_slot(serve: Serve) -> None:
    server = await serve(ScriptedEngine(counting(1)))
    for _ in range(20):
        call = server.decode()
        assert (await event(call)).HasField("reserved")
        call.cancel()
        await server.all_free()
    assert server.ended("cancelled") == 20
    await rest(await server.landed())


async def test_a_client_that_leaves_in_mid_stream_stops_the_engine_within_a_step(serve: Serve) -> None:
    script = Endless(paced=True)
    server = await serve(ScriptedEngine(script))
    call = await server.landed()
    script.pace.release(3)
    for _ in range(3):
        assert (await event(call)).HasField("tokens")
    call.cancel()
    await server.all_free()
    assert script.stopped.is_set()
    assert script.steps <= 4
    await comes_true(lambda: server.freed == [(0, 1)])


async def test_ten_clients_that_leave_one_after_another_leave_no_trace(serve: Serve) -> None:
    server = await serve(ScriptedEngine(Endless()))
    for _ in range(10):
        call = await server.landed()
        assert (await event(call)).HasField("tokens")
        call.cancel()
        await server.all_free()
    assert server.ended("cancelled") == 10
    assert [slot.memory.generation for slot in server.slots] == [0, 0]


async def test_a_second_request_lands_meanwhile_and_waits_for_its_turn(serve: Serve) -> None:
    script = Endless(paced=True)
    server = await serve(ScriptedEngine(script))
    first = await server.landed(0)
    script.pace.release()
    assert (await event(first)).HasField("tokens")
    second = await server.landed(1)
    waiting = asyncio.create_task(event(second))
    script.pace.release(2)
    assert (await event(first)).HasField("tokens")
    done, _ = await asyncio.wait([waiting], timeout=0.1)
    assert not done
    first.cancel()
    await comes_true(lambda: server.slots[0].state is SlotState.FREE, within_s=1)
    script.pace.release()
    assert (await waiting).tokens.position == 1
    second.cancel()
    await server.all_free()


async def test_a_client_that_leaves_while_it_waits_for_its_turn_frees_its_slot(serve: Serve) -> None:
    script = Endless(paced=True)
    server = await serve(ScriptedEngine(script))
    first, second = await server.landed(0), await server.landed(1)
    await comes_true(lambda: server.slots[1].state is SlotState.DECODING)
    second.cancel()
    await comes_true(lambda: server.slots[1].state is SlotState.FREE, within_s=1)
    script.pace.release()
    assert (await event(first)).HasField("tokens")
    first.cancel()
    await server.all_free()


async def test_kv_that_never_lands_is_waited_for_so_long_and_no_longer(serve: Serve) -> None:
    server = await serve(ScriptedEngine(counting(1)), landing_timeout=0.1)
    events = await rest(server.decode())
    assert events[-1].failed.code == "timeout"
    assert "no KV cache landed within 0.1 s" in events[-1].failed.message
    await server.all_free()
    assert server.ended("timeout") == 1


async def test_a_handoff_that_fails_is_told_at_once(serve: Serve) -> None:
    server = await serve(ScriptedEngine(counting(1)))
    call = server.decode()
    assert (await event(call)).HasField("reserved")
    server.slots[0].abort(b"scheduler", "h1", 1, "preempted", writing=False)
    (failed,) = await rest(call)
    assert (failed.failed.code, failed.failed.message) == ("handoff_failed", "the connector gave up: preempted")
    await server.all_free()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (EngineError("logits are not finite"), "engine_failed", "logits are not finite"),
        (RuntimeError("out of memory"), "internal_error", "RuntimeError: out of memory"),
        (TimeoutError("some wait"), "internal_error", "TimeoutError: some wait"),  # not the landing's
    ],
)
async def test_an_engine_that_fails_ends_its_request_and_serves_the_next(
    serve: Serve, error: Exception, code: str, message: str
) -> None:
    def script(cancelled: Callable[[], bool]) -> Iterator[Step]:
        yield Step((1,))
        if not engine.asked[1:]:
            raise error
        yield Step((2,), FinishReason.STOP)

    engine = ScriptedEngine(script)
    server = await serve(engine)
    step, failed = await rest(await server.landed())
    assert list(step.tokens.ids) == [1]
    assert (failed.failed.code, failed.failed.message) == (code, message)
    await server.all_free()
    assert server.ended(code) == 1
    assert (await rest(await server.landed()))[-1].tokens.finish == pb.Tokens.STOP


async def test_an_error_before_the_first_step_is_told_too(serve: Serve) -> None:
    def refuse() -> None:
        raise EngineError("10 tokens of KV do not fit")

    server = await serve(ScriptedEngine(counting(1), ready=refuse))
    (failed,) = await rest(await server.landed())
    assert (failed.failed.code, failed.failed.message) == ("engine_failed", "10 tokens of KV do not fit")
    await server.all_free()


async def test_the_landing_memory_is_not_given_away_while_the_engine_reads_it(serve: Serve) -> None:
    inside, may_go = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert may_go.wait(5)

    server = await serve(ScriptedEngine(counting(1), ready=wait))
    call = await server.landed()
    assert await asyncio.to_thread(inside.wait, 5)
    call.cancel()
    stopping = asyncio.create_task(server.server.stop(0))  # the handler is cancelled a second time
    settling = asyncio.create_task(server.service.settle())
    done, _ = await asyncio.wait([settling], timeout=0.2)
    assert not done
    assert server.slots[0].state is SlotState.DECODING
    may_go.set()
    await asyncio.wait_for(settling, 1)
    await server.all_free()
    await stopping


async def test_a_reader_that_does_not_read_holds_neither_the_engine_nor_for_long_its_slot(serve: Serve) -> None:
    def script(cancelled: Callable[[], bool]) -> Iterator[Step]:
        if len(engine.asked) == 1:
            crowd = (2**31,) * 50_000
            yield from [Step(crowd)] * 100  # 25 MB, more than the connection's buffers take
        yield Step((1,), FinishReason.LENGTH)

    engine = ScriptedEngine(script)
    server = await serve(engine, reader_grace=0.5)
    lazy = await server.landed(0)
    quick = await server.landed(1)
    assert (await rest(quick))[-1].tokens.finish == pb.Tokens.LENGTH
    assert server.slots[0].state is SlotState.DECODING
    await comes_true(lambda: server.ended("reader_stalled") == 1, within_s=3)
    await server.all_free()
    lazy.cancel()
    await rest(await server.landed(0))
