"""What the lane leaves to plain vLLM, and what it costs the requests that never asked for it."""

import asyncio

import pytest

from tests.kit.lane import LATENCY, LaneStack, chat, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_request_without_the_header_is_no_ext_proc_message(lane: LaneStack) -> None:
    calls = lane.counted("anchorleg_ext_proc_calls_total")
    started = await lane.stats("ext_proc.streams_started")
    for _ in range(20):
        answer = await lane.post(chat(), headers={})
        assert answer.json()["choices"][0]["message"]["content"] == "plain"
        assert not [name for name in answer.headers if name.startswith("x-slo")]
    assert lane.counted("anchorleg_ext_proc_calls_total") == calls
    assert await lane.stats("ext_proc.streams_started") == started


async def test_a_request_for_plain_vllm_leaves_ext_proc_before_vllm_answers(lane: LaneStack) -> None:
    lane.vllm.script.delay_s = 0.5
    running = asyncio.create_task(lane.post(chat(tools=[{"type": "function"}])))

    async def over() -> bool:
        stats = await lane.stats(r"ext_proc\.(streams_started|streams_closed)")
        return bool(lane.vllm.requests) and len(set(stats.values())) == 1

    await until(over, "the ext_proc call is over")
    assert not running.done(), "vLLM has answered before it was looked at"
    assert (await running).headers["x-slo-reason"] == "unsupported_tools"


async def test_a_fast_answer_of_plain_vllm_is_never_lost_between_the_last_message_and_the_calls_end(lane: LaneStack) -> None:
    for _ in range(200):
        by_headers = await lane.client.get("/v1/models", headers=LATENCY)
        by_body = await lane.post(chat(n=2))
        assert by_headers.json()["object"] == "list"
        assert by_body.json()["choices"][0]["message"]["content"] == "plain"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"model": x', "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b"", "no_body"),
        (chat(model="no-such-model"), "no_daemon"),
        (chat(temperature=-1), "unsupported_temperature"),
        (chat(n=4), "unsupported_n"),
        (chat(not_a_field=1), "unknown_field"),
        (chat(messages=[{"role": "user", "content": "x" * 30_000}]), "too_long"),
    ],
)
async def test_what_the_lane_cannot_serve_goes_to_vllm_untouched_with_a_reason(
    lane: LaneStack, body: object, reason: str
) -> None:
    answer = await lane.post(body)
    assert answer.headers["x-slo-lane"] == "throughput"
    assert answer.headers["x-slo-reason"] == reason
    if isinstance(body, dict):
        assert lane.vllm.bodies()[-1] == body
    assert (await lane.post(chat())).json()["choices"][0]["message"]["content"] == "Hello", "the next request is not served"


@pytest.mark.parametrize("value", ["bogus", "", "latency,latency", "x" * 4096])
async def test_an_unknown_class_is_served_by_plain_vllm(lane: LaneStack, value: str) -> None:
    answer = await lane.post(chat(), {"x-slo-class": value})
    assert answer.status_code == 200
    assert answer.headers["x-slo-reason"] == "unknown_class"


async def test_a_body_over_the_limit_is_answered_413_in_openais_form(lane: LaneStack) -> None:
    answer = await lane.post(chat(messages=[{"role": "user", "content": "x" * (5 << 20)}]))
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await lane.post(chat())).json()["choices"][0]["message"]["content"] == "Hello"


async def test_a_long_prompt_within_the_limit_passes(lane: LaneStack) -> None:
    answer = await lane.post(chat(messages=[{"role": "user", "content": "x" * (3 << 20)}]))
    assert answer.headers["x-slo-reason"] == "too_long"
    assert answer.json()["choices"][0]["message"]["content"] == "plain"


async def test_deny_turns_each_reason_into_an_error_that_names_the_field(lane: LaneStack) -> None:
    answer = await lane.post(chat(tools=[{"type": "function"}]), {**LATENCY, "x-slo-fallback": "deny"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert not lane.vllm.requests


async def test_other_paths_pass_with_the_header(lane: LaneStack) -> None:
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/health"),
        ("POST", "/tokenize"),
        ("HEAD", "/v1/models"),
        ("GET", "/none"),
    ):
        answer = await lane.client.request(method, path, headers=LATENCY)
        assert answer.headers["x-slo-reason"] == "unsupported_path"
        assert answer.status_code < 500


async def test_what_envoy_refuses_before_it_has_chosen_a_route_reaches_the_client(lane: LaneStack) -> None:
    calls = lane.counted("anchorleg_ext_proc_calls_total")
    answer = await lane.client.get("/health", headers={"x-long": "x" * 70_000})
    assert answer.status_code == 431
    assert lane.counted("anchorleg_ext_proc_calls_total") == calls
