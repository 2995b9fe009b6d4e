"""The ext_proc service over a real channel, as Envoy's own client side speaks to it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub

from extproc.server import ExtProcService, running
from gateway.settings import GatewaySettings
from process.errors import PortBusyError
from tests.kit.ext_proc import request_body, request_headers, response_body, response_headers
from tests.kit.gateway import SECRET, chat, ids_of, prefill_answer
from tests.kit.legs import reserved
from tests.kit.rig import Stage
from tests.kit.valkey import ValkeyProcess, eventually

FIRST = ids_of(" Paris.")[0]
STREAM = json.dumps(chat(max_tokens=50, stream=True)).encode()


@asynccontextmanager
async def channel_to(stage: Stage) -> AsyncIterator[Any]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((ExtProcService(stage.rig.lane).handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield ExternalProcessorStub(channel)
    finally:
        await server.stop(None)


async def answers_of(call: Any) -> list[Any]:
    """All messages until the server ends the call; the client's side stays open, as Envoy's does."""
    received = []
    async with asyncio.timeout(5):
        while (message := await call.read()) is not grpc.aio.EOF:
            received.append(message)
    return received


@pytest.mark.parametrize("repeat", range(8))
async def test_a_plain_decisions_last_message_and_the_end_of_the_call_arrive(stage: Stage, repeat: int) -> None:
    async with channel_to(stage) as stub:
        call = stub.Process()
        await call.write(request_headers())
        await call.write(request_body(json.dumps(chat(n=2)).encode()))
        assert [message.WhichOneof("response") for message in await answers_of(call)] == ["request_headers", "request_body"]
        assert await call.code() is grpc.StatusCode.OK


async def test_an_early_decision_is_one_message_and_the_end(stage: Stage) -> None:
    async with channel_to(stage) as stub:
        call = stub.Process()
        await call.write(request_headers(path="/v1/models", method="GET", end=True))
        (only,) = await answers_of(call)
        assert only.WhichOneof("response") == "request_headers"
        assert await call.code() is grpc.StatusCode.OK
    assert stage.rig.value("anchorleg_ext_proc_calls_total") == 1


async def test_a_whole_latency_request_is_served(stage: Stage) -> None:
    async with channel_to(stage) as stub:
        call = stub.Process()
        for message in (request_headers(), request_body(STREAM), response_headers()):
            await call.write(message)
        await call.write(response_body(json.dumps(prefill_answer(FIRST)).encode()))
        received = await answers_of(call)
        assert await call.code() is grpc.StatusCode.OK
    body = b"".join(message.response_body.response.body_mutation.streamed_response.body for message in received)
    assert body.endswith(b"data: [DONE]\n\n")
    assert stage.rig.requests() == {("latency", "completed", "ok"): 1}


async def test_a_body_over_grpcs_own_limit_is_read(stage: Stage) -> None:
    async with channel_to(stage) as stub:
        call = stub.Process()
        await call.write(request_headers())
        await call.write(request_body(json.dumps(chat(n=2, user="x" * (5 << 20))).encode()))
        assert len(await answers_of(call)) == 2


async def test_messages_out_of_order_end_the_call_with_a_reason(stage: Stage) -> None:
    async with channel_to(stage) as stub:
        call = stub.Process()
        await call.write(request_body(b"{}"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers_of(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "request_body where request_headers was due" in (caught.value.details() or "")


async def test_a_fault_of_the_gateways_own_ends_the_call_with_an_error_and_the_next_is_served(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with channel_to(stage) as stub:
        with monkeypatch.context() as patch:
            patch.setattr("gateway.lane.why_not", lambda body: 1 / 0)
            call = stub.Process()
            await call.write(request_headers())
            await call.write(request_body(STREAM))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answers_of(call)
            assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert stage.rig.requests() == {("none", "failed", "undecided"): 1}
        again = stub.Process()
        await again.write(request_headers(path="/v1/models"))
        assert len(await answers_of(again)) == 1


@pytest.mark.parametrize("sent", [2, 3, 4])
async def test_a_call_that_envoy_cancels_frees_the_slot_within_a_second(stage: Stage, sent: int) -> None:
    stage.daemon.script = [reserved(), "hang"]
    messages = [request_headers(), request_body(STREAM), response_headers()]
    messages.append(response_body(json.dumps(prefill_answer(FIRST)).encode()))
    async with channel_to(stage) as stub:
        call = stub.Process()
        for message in messages[:sent]:
            await call.write(message)
        for answered in ("request_headers", "request_body"):  # the slot is reserved by then
            assert (await call.read()).WhichOneof("response") == answered
        call.cancel()
        await asyncio.wait_for(stage.daemon.cancelled.wait(), 1)

        async def free() -> bool:
            return await stage.rig.free_slots() == 1

        await eventually(free, within_s=1)
        assert stage.rig.requests() == {("latency", "cancelled", "ok"): 1}


def settings(valkey: ValkeyProcess, **more: Any) -> GatewaySettings:
    values: dict[str, Any] = {"secret": SECRET, "redis_url": valkey.url, "listen_port": 0, "metrics_port": 0}
    return GatewaySettings.load(**values | {"drain_timeout_s": 0.0} | more)


async def test_a_gateway_starts_serves_and_stops(valkey: ValkeyProcess) -> None:
    async with running(settings(valkey)) as gateway, grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}") as channel:
        call = ExternalProcessorStub(channel).Process()
        await call.write(request_headers(path="/v1/models"))
        assert len(await answers_of(call)) == 1
    with pytest.raises(grpc.aio.AioRpcError):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}") as channel:
            await answers_of(ExternalProcessorStub(channel).Process())


async def test_a_draining_gateway_finishes_streams_spills_those_who_wait_and_answers_those_who_come(
    stage: Stage, valkey: ValkeyProcess
) -> None:
    stage.daemon.script = [reserved(), "hang"]
    waits = request_headers(("x-slo-class", b"latency"), ("x-slo-max-wait-ms", b"9000"))
    body = request_body(STREAM)
    config = settings(valkey, upstream_url=stage.vllm.url, drain_timeout_s=30.0)
    async with AsyncExitStack() as whole, AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running(config))
        channel = await whole.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}"))
        stub = ExternalProcessorStub(channel)
        served, waiting = stub.Process(), stub.Process()
        await said(served, request_headers(), body)
        assert reason(await served.read()) == "ok"
        await said(waiting, waits, body)
        assert (await waiting.read()).override_message_timeout.seconds >= 9

        async def queued() -> bool:
            return await stage.rig.queue() == 1

        await eventually(queued)
        draining = asyncio.create_task(stack.pop_all().aclose())
        assert reason((await answers_of(waiting))[-1]) == "draining"
        late = stub.Process()
        await late.write(request_headers())
        assert [reason(answer) for answer in await answers_of(late)] == ["draining"]
        assert not draining.done()
        assert gateway.metrics.registry.get_sample_value("anchorleg_slot_wait_seconds_count", {"ended": "denied"}) == 1
        served.cancel()
        await asyncio.wait_for(draining, 5)


async def test_a_gateway_that_stops_while_a_daemon_is_asked_gives_the_lease_back(stage: Stage, valkey: ValkeyProcess) -> None:
    stage.daemon.script = ["hang"]
    config = settings(valkey, upstream_url=stage.vllm.url, reserve_timeout_s=30.0)
    with structlog.testing.capture_logs() as logs:
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(running(config))
            async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}") as channel:
                await said(ExternalProcessorStub(channel).Process(), request_headers(), request_body(STREAM))

                async def leased() -> bool:
                    return await stage.rig.free_slots() == 0

                await eventually(leased)
                await stack.aclose()
    assert [entry for entry in logs if entry["log_level"] == "warning"] == []


async def said(call: Any, headers: Any, body: Any) -> None:
    """Send a request as Envoy does: the body once the headers are answered."""
    await call.write(headers)
    assert (await call.read()).WhichOneof("response") == "request_headers"
    await call.write(body)


def reason(answer: Any) -> str:
    return str(answer.dynamic_metadata["anchorleg"]["reason"])


async def test_a_gateway_starts_without_redis() -> None:
    values: dict[str, Any] = {"secret": SECRET, "redis_url": "unix:///nowhere.sock", "listen_port": 0, "metrics_port": 0}
    async with running(GatewaySettings.load(**values, leases_timeout_s=0.2, drain_timeout_s=0.0)) as gateway:
        assert gateway.metrics.registry.get_sample_value("anchorleg_lease_table_up") == 0


async def test_a_busy_port_is_named_with_the_way_out(valkey: ValkeyProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortBusyError, match=rf"127.0.0.1:{port}.*--listen-port"):
            async with running(settings(valkey, listen_port=port)):
                pytest.fail("it started")
