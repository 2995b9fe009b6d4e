"""Envoy, ext_proc and the lease table together: what clients of the latency lane get, and what the legs are asked."""

import asyncio
import itertools
import json
import time
from typing import Any

import pytest
from openai import AsyncOpenAI

from benchmarks.fakes import END, MODEL, PROMPT_IDS
from tests.kit.lane import LATENCY, LaneStack, chat, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


def openai_client(lane: LaneStack) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"http://127.0.0.1:{lane.envoy_port}/v1", api_key="a key", default_headers=LATENCY, max_retries=0
    )


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_the_openai_client_streams_the_first_token_of_prefill_and_the_daemons_after_it(lane: LaneStack) -> None:
    async with openai_client(lane) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(text or "" for text in texts) == "Hello"
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT_IDS), len("Hello") + 1)


async def test_the_openai_client_gets_one_object_when_it_does_not_stream(lane: LaneStack) -> None:
    async with openai_client(lane) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3
        )
    answer = raw.parse()
    assert answer.choices[0].message.content == "Hel"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert raw.headers["x-slo-lane"] == "latency"
    assert {stage.split(";")[0] for stage in raw.headers["server-timing"].split(", ")} == {
        "decide",
        "slot",
        "reserve",
        "prefill",
    }


@pytest.mark.parametrize("stream", [True, False])
async def test_a_completion_is_served_as_one(lane: LaneStack, stream: bool) -> None:
    async with openai_client(lane) as client:
        raw = await client.completions.with_raw_response.create(model=MODEL, prompt="the prompt", stream=stream)
        answer = raw.parse()
        texts = [part.choices[0].text async for part in answer] if stream else [answer.choices[0].text]  # type: ignore[union-attr]
    assert "".join(texts) == "Hello"
    assert raw.headers["x-slo-lane"] == "latency"
    [prefill] = lane.vllm.bodies("/v1/completions")
    assert (prefill["prompt"], prefill["max_tokens"]) == ("the prompt", 1)


async def test_both_legs_get_the_same_sampling_and_only_prefill_gets_the_prompt(lane: LaneStack) -> None:
    await lane.post(chat(temperature=0.7, top_p=0.9, top_k=5, seed=11, stop=["zzz"], user="me"))
    [prefill] = lane.vllm.bodies()
    [decode] = lane.daemon.requests
    assert prefill["messages"] == chat()["messages"]
    assert prefill["max_tokens"] == 1
    assert prefill["stream"] is False
    assert not {"stop", "stream_options", "max_completion_tokens"} & prefill.keys()
    for name in ("temperature", "top_p", "top_k", "seed"):
        assert getattr(decode, name) == prefill[name]
    assert decode.max_tokens == 16
    assert list(decode.stop_token_ids) == [END]
    claim = prefill["kv_transfer_params"]["anchorleg"]["claim"]
    assert (claim["handoff_id"], claim["slot"], claim["epoch"]) == (decode.handoff_id, decode.slot, decode.epoch)


async def test_a_stop_string_that_spans_the_handoff_ends_the_answer_and_the_decode(lane: LaneStack) -> None:
    lane.daemon.script.interval_s = 0.01
    lane.daemon.script.tokens = [*b"ello and much more", END]
    answer = (await lane.post(chat(stop=["Hel"]))).json()
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["stop_reason"] == "Hel"
    assert answer["usage"]["completion_tokens"] == 3


async def test_tokens_of_a_slow_engine_arrive_one_by_one(lane: LaneStack) -> None:
    lane.daemon.script.interval_s = 0.05
    arrivals: list[float] = []
    async with lane.client.stream(
        "POST", "/v1/chat/completions", json=chat(stream=True), headers={**LATENCY, "content-type": "application/json"}
    ) as response:
        async for _ in response.aiter_raw():
            arrivals.append(time.monotonic())
    gaps = [after - before for before, after in itertools.pairwise(arrivals[:6])]
    assert min(gaps) > 0.02, f"two tokens came in one burst: {gaps}"


async def test_token_one_does_not_wait_for_the_daemon(lane: LaneStack) -> None:
    lane.daemon.script.hang_after = 0
    async with lane.client.stream(
        "POST", "/v1/chat/completions", json=chat(stream=True), headers={**LATENCY, "content-type": "application/json"}
    ) as response:
        first = await anext(response.aiter_text())
    assert '"content":"H"' in first


async def test_a_first_token_that_ends_the_answer_needs_no_decode(lane: LaneStack) -> None:
    lane.vllm.script.finish_reason = "stop"
    lane.vllm.script.first_token = END
    answer = (await lane.post(chat())).json()
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1


async def test_requests_beyond_the_slots_are_served_by_plain_vllm(lane: LaneStack) -> None:
    lane.daemon.script.hang_after = 1
    held = [asyncio.create_task(lane.post(chat(stream=True))) for _ in range(lane.daemon.slots)]
    await until(lambda: len(lane.daemon.requests) == lane.daemon.slots, "every slot is taken")
    spilled = await lane.post(chat())
    denied = await lane.post(chat(), {**LATENCY, "x-slo-fallback": "deny"})
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert spilled.json()["choices"][0]["message"]["content"] == "plain"
    assert (spilled.headers["x-slo-lane"], spilled.headers["x-slo-reason"]) == ("throughput", "no_free_slot")
    assert denied.status_code == 429
    assert int(denied.headers["retry-after"]) >= 1
    assert denied.json()["error"]["code"] == "no_free_slot"


@pytest.mark.parametrize("when", ["in prefill", "before token 2", "in mid-stream"])
async def test_a_client_that_leaves_frees_the_slot_within_a_second(lane: LaneStack, when: str) -> None:
    lane.vllm.script.delay_s = 30.0 if when == "in prefill" else 0.0
    lane.daemon.script.hang_after = {"in prefill": 0, "before token 2": 0, "in mid-stream": 2}[when]
    before = lane.daemon.cancelled
    task = asyncio.create_task(lane.post(chat(stream=True)))
    await until(lambda: bool(lane.daemon.requests and lane.vllm.requests), "both legs have the request")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await lane.all_free(1.0)
    assert lane.daemon.cancelled == before + 1


async def test_vllms_refusal_passes_byte_for_byte_and_the_slot_is_free(lane: LaneStack) -> None:
    lane.vllm.script.status = 400
    answer = await lane.post(chat())
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "scripted 400"
    assert "x-anchorleg-answered" not in answer.headers


@pytest.mark.parametrize("stream", [True, False])
async def test_a_daemon_that_fails_in_mid_answer_is_replaced_by_vllm_and_no_token_is_lost(
    lane: LaneStack, stream: bool
) -> None:
    lane.daemon.script.fail_after = 2
    lane.vllm.script.resumed = [*b"lo", END]
    response = await lane.post(chat(stream=stream))
    if stream:
        chunks = events(response.text)
        assert chunks[-1] == "[DONE]"
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    else:
        text = response.json()["choices"][0]["message"]["content"]
    assert text == "Hello"
    [resumed] = lane.vllm.bodies("/v1/completions")
    assert bytes(resumed["prompt"]) == bytes(PROMPT_IDS) + b"Hel"
    assert resumed["max_tokens"] == 16 - 3


async def test_a_daemon_that_refuses_leaves_the_request_to_plain_vllm(lane: LaneStack) -> None:
    lane.daemon.script.refuse = "draining"
    answer = await lane.post(chat())
    assert answer.json()["choices"][0]["message"]["content"] == "plain"
    assert answer.headers["x-slo-reason"] == "daemon_unavailable"


async def test_a_connector_that_did_not_take_the_claim_costs_the_client_nothing_and_is_counted(lane: LaneStack) -> None:
    """A5: a prefill leg without its parameters is never passed over in silence."""
    lane.vllm.script.hand_over = False
    before = lane.counted("anchorleg_resumed_total", reason="no_handoff", way="whole")
    answer = await lane.post(chat())
    assert lane.counted("anchorleg_resumed_total", reason="no_handoff", way="whole") == before + 1
    assert answer.json()["choices"][0]["message"]["content"] == "plain"
    first, replayed = lane.vllm.bodies()
    assert "kv_transfer_params" in first
    assert replayed == chat()


async def test_the_access_log_tells_class_lane_reason_and_stages(lane: LaneStack) -> None:
    await lane.post(chat(), {**LATENCY, "x-request-id": "seek-me"})
    await until(lambda: any(e.get("request_id") == "seek-me" for e in lane.access_log()), "the log has the request", 15)
    entry = next(e for e in lane.access_log() if e.get("request_id") == "seek-me")
    assert (entry["slo_class"], entry["lane"], entry["reason"]) == ("latency", "latency", "ok")
    assert "prefill;dur=" in entry["stages"]


async def test_metrics_count_requests_stages_and_tokens(lane: LaneStack) -> None:
    labels = {"slo_class": "latency", "lane": "latency", "outcome": "completed", "reason": "ok"}
    before = lane.counted("anchorleg_requests_total", **labels), lane.counted("anchorleg_tokens_total")
    await lane.post(chat())
    assert lane.counted("anchorleg_requests_total", **labels) == before[0] + 1
    assert lane.counted("anchorleg_tokens_total") == before[1] + len("Hello") + 1
    for stage in ("decide", "slot", "reserve", "prefill", "handoff", "gap"):
        assert lane.counted("anchorleg_stage_seconds_count", stage=stage) > 0
