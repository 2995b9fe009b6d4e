"""One ext_proc call, message by message, as Envoy may drive it."""

import asyncio
import json
from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext
from google.protobuf.json_format import MessageToDict

from extproc.stream import ExtProcStream, ProtocolError
from gateway.sse import EventReader
from handoff.claim import CLAIM_KEY
from tests.kit.ext_proc import ScriptedWire, request_body, request_headers, response_body, response_headers, response_trailers
from tests.kit.gateway import chat, ids_of, prefill_answer, prefill_completion, prompt_request
from tests.kit.legs import answers, breaks, reserved, streams
from tests.kit.rig import Stage, rig
from tests.kit.valkey import eventually

CHAT = "/v1/chat/completions"
FIRST = ids_of(" Paris.")[0]
BODY = json.dumps(chat(max_tokens=50)).encode()
STREAM = json.dumps(chat(max_tokens=50, stream=True)).encode()
PREFILLED = json.dumps(prefill_answer(FIRST)).encode()
LATENCY, DENY = ("x-slo-class", b"latency"), ("x-slo-fallback", b"deny")
COUNTED_OK = {("latency", "completed", "ok"): 1}


async def call(stage: Stage, *sent: Any) -> tuple[list[ext.ProcessingResponse], ext.ProcessingResponse]:
    """What was written, and the call's last message."""
    wire = ScriptedWire(*sent)
    async with asyncio.timeout(10):
        last = await ExtProcStream(stage.rig.lane, wire).run()
    return wire.written, last


def kinds(messages: list[ext.ProcessingResponse]) -> list[str | None]:
    return [message.WhichOneof("response") for message in messages]


def metadata(message: ext.ProcessingResponse) -> dict[str, Any]:
    return dict(MessageToDict(message.dynamic_metadata).get("anchorleg", {}))


def set_headers(message: ext.ProcessingResponse) -> dict[str, bytes]:
    part = getattr(message, str(message.WhichOneof("response")))
    mutation = part.headers if isinstance(part, ext.ImmediateResponse) else part.response.header_mutation
    return {option.header.key: option.header.raw_value for option in mutation.set_headers}


def streamed(messages: list[ext.ProcessingResponse]) -> bytes:
    """The response body; fails where a message has it in another form."""
    body = b""
    for message in messages:
        if message.WhichOneof("response") == "response_body":
            mutation = message.response_body.response.body_mutation
            assert mutation.WhichOneof("mutation") == "streamed_response"
            body += mutation.streamed_response.body
    return body


def ends(message: ext.ProcessingResponse) -> bool:
    return bool(message.response_body.response.body_mutation.streamed_response.end_of_stream)


async def all_free(stage: Stage) -> None:
    async def free() -> bool:
        return await stage.rig.free_slots() == 1

    await eventually(free, within_s=1)


class TestRequestPhase:
    async def test_headers_that_decide_alone_are_answered_once_and_end_the_call(self, stage: Stage) -> None:
        for sent, reason in (
            (request_headers(("x-slo-class", b"bogus")), "unknown_class"),
            (request_headers(("x-slo-class", b"throughput")), "throughput_class"),
            (request_headers(method="GET", end=True), "unsupported_path"),
            (request_headers(method="HEAD", end=True), "unsupported_path"),
            (request_headers(method="OPTIONS", end=True), "unsupported_path"),
            (request_headers(path="/tokenize"), "unsupported_path"),
            (request_headers(path="/v1/completions/"), "unsupported_path"),
            (request_headers(end=True), "no_body"),
        ):
            written, last = await call(stage, sent)
            assert written == []
            assert last.WhichOneof("response") == "request_headers"
            assert not last.request_headers.HasField("response")
            assert metadata(last) == {"lane": "throughput", "reason": reason}
            assert stage.rig.requests()["throughput", "passed", reason] >= 1
        assert sum(stage.rig.requests().values()) == 8

    @pytest.mark.parametrize(
        ("content", "reason"),
        [(b"", "invalid_json"), (b"[]", "invalid_json"), (json.dumps(chat(n=2)).encode(), "unsupported_n")],
    )
    async def test_a_body_that_is_plain_vllms_goes_on_untouched_and_ends_the_call(
        self, stage: Stage, content: bytes, reason: str
    ) -> None:
        written, last = await call(stage, request_headers(), request_body(content))
        assert kinds(written) == ["request_headers"]
        assert last.WhichOneof("response") == "request_body"
        assert not last.request_body.HasField("response")
        assert metadata(last) == {"lane": "throughput", "reason": reason}
        assert stage.rig.requests() == {("throughput", "passed", reason): 1}

    @pytest.mark.parametrize("early", [True, False])
    async def test_a_refusal_is_one_immediate_answer_in_openais_form(self, stage: Stage, early: bool) -> None:
        path = "/v1/responses" if early else CHAT
        sent = [request_headers(LATENCY, DENY, path=path), request_body(json.dumps(chat(n=2)).encode())]
        written, last = await call(stage, *sent[: 1 if early else 2])
        assert kinds(written) == ([] if early else ["request_headers"])
        assert last.WhichOneof("response") == "immediate_response"
        assert last.immediate_response.status.code == 400
        reason = "unsupported_path" if early else "unsupported_n"
        assert json.loads(last.immediate_response.body)["error"]["code"] == reason
        assert set_headers(last) == {"content-type": b"application/json", "x-slo-reason": reason.encode()}
        assert metadata(last) == {"reason": reason}
        assert stage.rig.requests() == {("none", "refused", reason): 1}

    async def test_an_unavailable_lane_says_when_to_come_again(self, stage: Stage) -> None:
        content = json.dumps(chat(model="another")).encode()
        _, last = await call(stage, request_headers(LATENCY, DENY), request_body(content))
        assert last.immediate_response.status.code == 503
        assert set_headers(last)["retry-after"] == b"1"

    @pytest.mark.parametrize(
        ("wait", "announced"), [(b"5000", True), (b" 1 ", True), (b"0", False), (b"", False), (b"-5", False), (b"1e9", False)]
    )
    async def test_envoy_is_asked_for_time_before_a_request_that_may_wait_and_before_no_other(
        self, stage: Stage, wait: bytes, announced: bool
    ) -> None:
        written, _ = await call(stage, request_headers(LATENCY, ("x-slo-max-wait-ms", wait)), request_body(BODY))
        assert kinds(written) == ["request_headers", *([None] if announced else []), "request_body"]
        assert metadata(written[-1])["reason"] == "ok"
        if announced:
            assert written[1].override_message_timeout.seconds > int(wait) / 1000

    async def test_the_tenant_is_read_from_the_header_that_the_settings_name(self, stage: Stage) -> None:
        stage.daemon.script = [reserved(), "hang"]
        headers = request_headers(LATENCY, ("x-tenant", b"acme"))
        tenants = {"tenant_header": "x-tenant"}
        async with rig(stage.rig.parts.settings.redis_url, stage.vllm, **tenants) as named:
            wire = ScriptedWire(headers, request_body(BODY), then="hang")
            running = asyncio.create_task(ExtProcStream(named.lane, wire).run())
            await asyncio.wait_for(wire.drained.wait(), 5)
            ((node,), *_) = [report.nodes for report in (await named.table.inspect()).values()]
            assert [slot.tenant for slot in node.slots] == ["acme"]
            await cancelled(running)

    async def test_several_values_and_odd_bytes_are_no_known_class(self, stage: Stage) -> None:
        for headers in ((LATENCY, LATENCY), (("x-slo-class", b"latency\xff"),), (("x-slo-class", b""),)):
            _, last = await call(stage, request_headers(*headers))
            assert metadata(last)["reason"] == "unknown_class"

    async def test_other_headers_may_be_any_bytes(self, stage: Stage) -> None:
        odd = (LATENCY, ("cookie", b"\xff\xfe"), ("cookie", b""), ("authorization", b"Bearer \xe9"), ("x-empty", b""))
        stage.vllm.answers[CHAT] = answers({})
        await call(stage, request_headers(*odd), request_body(BODY), response_headers(), response_body(b"{}"))
        assert stage.vllm.asked[0].headers["authorization"].encode("utf-8", "surrogateescape") == b"Bearer \xe9"

    async def test_a_rewritten_body_carries_its_length_claim_and_mark(self, stage: Stage) -> None:
        written, _ = await call(stage, request_headers(), request_body(BODY))
        assert kinds(written) == ["request_headers", "request_body"]
        assert not written[0].request_headers.HasField("response")
        mutation = written[1].request_body.response.body_mutation
        assert mutation.WhichOneof("mutation") == "body"
        assert set_headers(written[1]) == {"content-length": str(len(mutation.body)).encode(), "accept-encoding": b"identity"}
        assert len(mutation.body) != len(BODY)
        assert CLAIM_KEY in json.loads(mutation.body)["kv_transfer_params"]
        assert metadata(written[1]) == {"lane": "latency", "reason": "ok", "rewritten": True}

    @pytest.mark.parametrize("ends_with_headers", [True, False])
    async def test_envoys_own_answer_to_a_body_too_long_passes_without_the_mark(
        self, stage: Stage, ends_with_headers: bool
    ) -> None:
        sent = [request_headers(), response_headers(413, end=ends_with_headers)]
        written, last = await call(stage, *sent, *([] if ends_with_headers else [response_body(b"too long")]))
        messages = [*written, last]
        assert kinds(messages) == ["request_headers", "response_headers"] + ([] if ends_with_headers else ["response_body"])
        assert set_headers(messages[1]) == {}
        assert streamed(messages) == (b"" if ends_with_headers else b"too long")
        assert stage.rig.requests() == {("none", "refused", "too_large"): 1}


class TestAnswerPhase:
    async def test_a_stream_is_answered_with_the_daemons_tokens(self, stage: Stage) -> None:
        written, last = await call(stage, request_headers(), request_body(STREAM), response_headers(), response_body(PREFILLED))
        assert kinds(written[:3]) == ["request_headers", "request_body", "response_headers"]
        assert set(kinds(written[3:])) == {"response_body"}
        assert not any(ends(message) for message in written)
        assert ends(last)
        assert set_headers(written[2])["x-anchorleg-answered"] == b"1"
        assert "content-length" in written[2].response_headers.response.header_mutation.remove_headers
        *events, done = EventReader().feed(streamed([*written, last]))
        assert done == b"[DONE]"
        said = [json.loads(event)["choices"][0]["delta"].get("content") for event in events]
        assert "".join(said) == " Paris."
        assert stage.rig.requests() == COUNTED_OK
        for name in ("decide", "slot", "reserve", "prefill", "handoff", "gap"):
            assert stage.rig.value("anchorleg_stage_seconds_count", stage=name) == 1, name
        await all_free(stage)

    async def test_a_whole_answer_waits_with_leave_and_has_its_length(self, stage: Stage) -> None:
        sent = [request_headers(), request_body(BODY), response_headers(), response_body(PREFILLED[:9], end=False)]
        written, last = await call(stage, *sent, response_body(PREFILLED[9:]))
        assert kinds(written) == ["request_headers", "request_body", None, "response_headers", "response_body"]
        assert written[2].override_message_timeout.seconds == stage.rig.parts.settings.generation_timeout_s
        body = streamed([*written, last])
        assert set_headers(written[3])["content-length"] == str(len(body)).encode()
        assert set_headers(written[3])["x-anchorleg-answered"] == b"1"
        assert json.loads(body)["choices"][0]["message"]["content"] == " Paris."
        assert ends(last)
        assert stage.rig.requests() == COUNTED_OK

    @pytest.mark.parametrize("stream", [True, False])
    async def test_a_completion_is_answered_as_one(self, stage: Stage, stream: bool) -> None:
        content = json.dumps(prompt_request(max_tokens=50, stream=stream)).encode()
        prefilled = json.dumps(prefill_completion(FIRST)).encode()
        headers = request_headers(path="/v1/completions?api-version=1")
        written, last = await call(stage, headers, request_body(content), response_headers(), response_body(prefilled))
        body = streamed([*written, last])
        parts = [json.loads(event) for event in EventReader().feed(body)[:-1]] if stream else [json.loads(body)]
        assert {part["object"] for part in parts} == {"text_completion"}
        assert "".join(part["choices"][0]["text"] for part in parts) == " Paris."
        assert json.loads(written[1].request_body.response.body_mutation.body)["prompt"] == prompt_request()["prompt"]
        assert stage.rig.requests() == COUNTED_OK

    async def test_trailers_of_the_answer_are_answered_instead_of_an_end(self, stage: Stage) -> None:
        sent = [request_headers(), request_body(STREAM), response_headers(), response_body(PREFILLED, end=False)]
        written, last = await call(stage, *sent, response_trailers())
        assert last.WhichOneof("response") == "response_trailers"
        assert not any(ends(message) for message in written)
        assert streamed(written).endswith(b"data: [DONE]\n\n")

    @pytest.mark.parametrize("status", [400, 404, 500, 503])
    async def test_vllms_refusal_passes_as_it_is_marked_and_frees_the_slot(self, stage: Stage, status: int) -> None:
        sent = [request_headers(), request_body(BODY), response_headers(status), response_body(b'{"er', end=False)]
        written, last = await call(stage, *sent, response_body(b'ror":1}'))
        assert kinds([*written, last])[2:] == ["response_headers", "response_body", "response_body"]
        assert set_headers(written[2]) == {"x-anchorleg-answered": b"1"}
        assert streamed([*written, last]) == b'{"error":1}'
        assert ends(last)
        assert stage.rig.requests() == {("latency", "vllm_error", "ok"): 1}
        await all_free(stage)

    async def test_a_refusal_without_a_body_or_with_trailers_passes_too(self, stage: Stage) -> None:
        begun = [request_headers(), request_body(BODY)]
        _, last = await call(stage, *begun, response_headers(503, end=True))
        assert set_headers(last) == {"x-anchorleg-answered": b"1"}
        await all_free(stage)
        sent = [*begun, response_headers(503), response_body(b"x", end=False), response_trailers()]
        written, last = await call(stage, *sent)
        assert last.WhichOneof("response") == "response_trailers"
        assert streamed(written) == b"x"

    async def test_an_answer_of_vllm_without_a_body_is_an_error(self, stage: Stage) -> None:
        _, last = await call(stage, request_headers(), request_body(BODY), response_headers(end=True))
        assert last.immediate_response.status.code == 502
        assert json.loads(last.immediate_response.body)["error"]["code"] == "bad_prefill_answer"
        assert stage.rig.requests() == {("latency", "failed", "ok"): 1}
        await all_free(stage)

    async def test_an_empty_answer_of_vllm_is_replaced_by_a_replay(self, stage: Stage) -> None:
        stage.vllm.answers[CHAT] = answers({"own": 1})
        written, last = await call(stage, request_headers(), request_body(BODY), response_headers(), response_body(b""))
        assert json.loads(streamed(written)) == {"own": 1}
        assert ends(last)
        assert stage.rig.requests() == {("latency", "resumed", "ok"): 1}
        await all_free(stage)

    async def test_an_answer_that_nobody_can_give_is_an_error_with_a_status(self, stage: Stage) -> None:
        stage.daemon.script = [reserved(), "die"]
        stage.vllm.answers[CHAT] = breaks
        written, last = await call(stage, request_headers(), request_body(BODY), response_headers(), response_body(PREFILLED))
        assert set_headers(written[3]) == {
            "content-type": b"application/json",
            "x-anchorleg-answered": b"1",
            ":status": b"502",
        }
        assert json.loads(streamed([*written, last]))["error"]["code"] == "decode_lost"
        assert ends(last)
        assert stage.rig.requests() == {("latency", "failed", "ok"): 1}

    async def test_a_replay_that_breaks_off_is_no_clean_end(self, stage: Stage) -> None:
        stage.vllm.answers[CHAT] = streams(b"data: 1\n\n", then="die")
        with pytest.raises(Exception, match="broke off"):
            await call(stage, request_headers(), request_body(STREAM), response_headers(), response_body(b"{}"))
        assert stage.rig.requests() == {("latency", "failed", "ok"): 1}


WHOLE = [request_headers(), request_body(STREAM), response_headers(), response_body(PREFILLED[:9], end=False)]


@pytest.mark.parametrize("messages", range(len(WHOLE) + 1))
async def test_envoy_may_end_the_call_after_any_message(stage: Stage, messages: int) -> None:
    written, last = await call(stage, *WHOLE[:messages])
    assert last == ext.ProcessingResponse()
    assert len(written) == min(messages, 2)
    expected = [{}, {("none", "cancelled", "undecided"): 1}, {("latency", "cancelled", "ok"): 1}]
    assert stage.rig.requests() == expected[min(messages, 2)]
    await all_free(stage)


EVERY = {
    "request_headers": request_headers(),
    "request_body": request_body(STREAM),
    "response_headers": response_headers(),
    "response_body": response_body(PREFILLED),
    "response_trailers": response_trailers(),
    "request_trailers": ext.ProcessingRequest(request_trailers=ext.HttpTrailers()),
    "nothing": ext.ProcessingRequest(),
}
DUE = [{"request_headers"}, {"request_body", "response_headers"}, {"response_headers"}, {"response_body", "response_trailers"}]


@pytest.mark.parametrize(("after", "wrong"), [(n, kind) for n, due in enumerate(DUE) for kind in EVERY if kind not in due])
async def test_a_message_out_of_order_ends_the_call_with_an_error(stage: Stage, after: int, wrong: str) -> None:
    with pytest.raises(ProtocolError):
        await call(stage, *WHOLE[:after], EVERY[wrong])
    assert sum(stage.rig.requests().values()) == (after > 0)
    assert all(outcome == "failed" for _, outcome, _ in stage.rig.requests())
    await all_free(stage)


@pytest.mark.parametrize("messages", range(1, len(WHOLE) + 1))
async def test_a_client_that_leaves_while_envoy_is_waited_for_is_counted_once_and_frees_the_slot(
    stage: Stage, messages: int
) -> None:
    wire = ScriptedWire(*WHOLE[:messages], then="hang")
    running = asyncio.create_task(ExtProcStream(stage.rig.lane, wire).run())
    await asyncio.wait_for(wire.drained.wait(), 5)
    await cancelled(running)
    assert sum(stage.rig.requests().values()) == 1
    assert {outcome for _, outcome, _ in stage.rig.requests()} == {"cancelled"}
    await all_free(stage)


@pytest.mark.parametrize("writes", range(6))
async def test_a_client_that_leaves_while_envoy_does_not_read_is_counted_once_and_frees_the_slot(
    stage: Stage, writes: int
) -> None:
    wire = ScriptedWire(*WHOLE[:3], response_body(PREFILLED), then="hang")
    wire.full_after = writes
    running = asyncio.create_task(ExtProcStream(stage.rig.lane, wire).run())
    blocked = asyncio.create_task(wire.blocked.wait())
    await asyncio.wait([running, blocked], return_when=asyncio.FIRST_COMPLETED, timeout=5)
    assert blocked.done(), "all was written"
    await cancelled(running)
    assert sum(stage.rig.requests().values()) == 1
    assert {outcome for _, outcome, _ in stage.rig.requests()} <= {"cancelled", "completed"}
    await all_free(stage)


async def test_a_client_that_leaves_at_any_step_is_counted_once_and_frees_the_slot(stage: Stage) -> None:
    for steps in range(0, 120, 4):
        wire = ScriptedWire(*WHOLE[:3], response_body(PREFILLED), then="hang")
        before = sum(stage.rig.requests().values())
        running = asyncio.create_task(ExtProcStream(stage.rig.lane, wire).run())
        for _ in range(steps):
            await asyncio.sleep(0)
        served = running.done()
        await cancelled(running)
        assert sum(stage.rig.requests().values()) - before <= 1
        if served:
            assert sum(stage.rig.requests().values()) - before == 1
        await stage.rig.lane.settle()
        await all_free(stage)


async def test_a_client_that_leaves_a_replay_stops_vllm(stage: Stage) -> None:
    stage.vllm.answers[CHAT] = streams(b"data: 1\n\n", then="hang")
    wire = ScriptedWire(*WHOLE[:3], response_body(b"{}"), then="hang")
    wire.full_after = 2  # the replayed answer's headers are not read any more
    running = asyncio.create_task(ExtProcStream(stage.rig.lane, wire).run())
    await asyncio.wait_for(wire.blocked.wait(), 5)
    await cancelled(running)
    await asyncio.wait_for(stage.vllm.left.wait(), 1)


async def cancelled(running: "asyncio.Task[Any]") -> None:
    running.cancel()
    await asyncio.wait([running], timeout=5)
    assert running.done()
