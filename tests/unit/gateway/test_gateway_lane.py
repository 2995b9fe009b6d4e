"""The request phase on a real lease table: who is served where."""

import asyncio
import json

from gateway.endpoints import Endpoint
from gateway.errors import BadRequest, LaneUnavailable, NoSlotInTime
from gateway.lane import Plain, Prefill, Refusal
from gateway.slo import SloClass, Wish
from handoff.claim import from_params
from tests.kit.deciding import ALLOW, DENY, WILLING, decide
from tests.kit.gateway import CREDENTIALS, card_message, end_id
from tests.kit.legs import ScriptedDaemon, ScriptedVllm
from tests.kit.rig import Rig, rig

CHAT = "/v1/chat/completions"


class TestEarly:
    async def test_headers_alone_send_it_to_plain_vllm(self, lane: Rig) -> None:
        for slo_class, method, path, has_body, reason in (
            (SloClass.UNKNOWN, "POST", CHAT, True, "unknown_class"),
            (SloClass.THROUGHPUT, "POST", CHAT, True, "throughput_class"),
            (SloClass.LATENCY, "GET", CHAT, False, "unsupported_path"),
            (SloClass.LATENCY, "HEAD", CHAT, False, "unsupported_path"),
            (SloClass.LATENCY, "OPTIONS", CHAT, False, "unsupported_path"),
            (SloClass.LATENCY, "POST", "/v1/chat/completions/", True, "unsupported_path"),
            (SloClass.LATENCY, "POST", "/v1/completions/", True, "unsupported_path"),
            (SloClass.LATENCY, "POST", "/v1/chat/completions/render", True, "unsupported_path"),
            (SloClass.LATENCY, "POST", "/V1/completions", True, "unsupported_path"),
            (SloClass.LATENCY, "POST", "/v1/messages", True, "unsupported_path"),
            (SloClass.LATENCY, "POST", "/v1/responses", True, "unsupported_path"),
            (SloClass.LATENCY, "POST", "/v1/embeddings", True, "unsupported_path"),
            (SloClass.LATENCY, "POST", "/tokenize", True, "unsupported_path"),
            (SloClass.LATENCY, "GET", "/v1/models", False, "unsupported_path"),
            (SloClass.LATENCY, "", "", True, "unsupported_path"),
            (SloClass.LATENCY, "POST", CHAT, False, "no_body"),
        ):
            wish = Wish(slo_class, fallback=True)
            assert lane.lane.early(wish, method, path, has_body=has_body) == Plain(reason), (method, path)

    async def test_the_bodies_of_both_endpoints_are_looked_at(self, lane: Rig) -> None:
        for endpoint in Endpoint:
            for path in (endpoint, f"{endpoint}?x=1", f"{endpoint}?"):
                assert lane.lane.early(ALLOW, "POST", path, has_body=True) is endpoint

    async def test_deny_makes_an_error_of_what_is_not_served(self, lane: Rig) -> None:
        refused = lane.lane.early(DENY, "POST", "/v1/responses", has_body=True)
        assert isinstance(refused, Refusal)
        assert isinstance(refused.error, BadRequest)
        assert refused.error.status == 400

    async def test_a_gateway_that_stops_takes_no_more(self, lane: Rig) -> None:
        lane.lane.drain()
        assert lane.lane.early(ALLOW, "POST", CHAT, has_body=True) == Plain("draining")
        refused = lane.lane.early(DENY, "POST", CHAT, has_body=True)
        assert isinstance(refused, Refusal)
        assert (refused.error.status, refused.error.retry_after_s) == (503, 1)


async def test_a_request_that_the_lane_serves_holds_a_reserved_slot(redis_url: str, vllm: ScriptedVllm) -> None:
    async with ScriptedDaemon(WILLING).registered(redis_url) as daemon, rig(redis_url, vllm) as made:
        decision = await decide(made, temperature=0, seed=5, top_k=-1)
        assert isinstance(decision, Prefill)
        signed = from_params(json.loads(decision.body)["kv_transfer_params"])
        assert signed is not None
        claim = made.parts.keys.verify(signed)
        (asked,) = daemon.requests
        assert (asked.handoff_id, asked.slot, asked.epoch) == (claim.handoff_id, claim.slot, claim.epoch)
        assert (asked.max_tokens, asked.temperature, asked.seed, asked.top_k) == (9, 0, 5, 0)
        assert list(asked.stop_token_ids) == [end_id()]
        assert (claim.host, claim.port) == ("127.0.0.1", 7002)
        assert set(decision.stages.seconds) == {"decide", "slot", "reserve"}
        assert await made.free_slots() == 0
        decision.stream.cancel()
        await asyncio.wait_for(daemon.cancelled.wait(), 1)


async def test_ignore_eos_leaves_the_daemon_no_stop_tokens(redis_url: str, vllm: ScriptedVllm) -> None:
    async with ScriptedDaemon(WILLING).registered(redis_url) as daemon, rig(redis_url, vllm) as made:
        decision = await decide(made, ignore_eos=True, max_tokens=None, seed=None)
        assert isinstance(decision, Prefill)
        assert list(daemon.requests[0].stop_token_ids) == []
        assert daemon.requests[0].max_tokens == 0
        assert not daemon.requests[0].HasField("seed")
        decision.stream.cancel()


async def test_a_body_that_is_no_object_is_vllms_to_refuse(lane: Rig) -> None:
    for raw in (b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"\xef\xbb\xbf{}"):
        assert await lane.lane.decide(ALLOW, Endpoint.CHAT, raw, CREDENTIALS) == Plain("invalid_json")
        refused = await lane.lane.decide(DENY, Endpoint.CHAT, raw, CREDENTIALS)
        assert isinstance(refused, Refusal)
        assert refused.error.status == 400


async def test_a_body_longer_than_any_context_is_not_looked_into(lane: Rig) -> None:
    assert await lane.lane.decide(ALLOW, Endpoint.CHAT, b"[" * (9 << 20), CREDENTIALS) == Plain("too_long")


async def test_a_field_that_is_not_served_falls_back_or_is_refused_by_name(lane: Rig) -> None:
    assert await decide(lane, n=2) == Plain("unsupported_n")
    refused = await decide(lane, DENY, n=2)
    assert isinstance(refused, Refusal)
    assert isinstance(refused.error, BadRequest)
    assert (refused.error.status, refused.error.param, refused.error.code) == (400, "n", "unsupported_n")
    assert await lane.free_slots() == 1


async def test_a_model_without_daemons_falls_back_or_is_unavailable(lane: Rig) -> None:
    assert await decide(lane, model="another") == Plain("no_daemon")
    refused = await decide(lane, DENY, model="another")
    assert isinstance(refused, Refusal)
    assert isinstance(refused.error, LaneUnavailable)
    assert (refused.error.status, refused.error.retry_after_s) == (503, 1)


async def test_busy_slots_fall_back_or_ask_to_come_again(lane: Rig) -> None:
    first = await decide(lane)
    assert isinstance(first, Prefill)
    assert await decide(lane) == Plain("no_free_slot")
    refused = await decide(lane, DENY)
    assert isinstance(refused, Refusal)
    assert isinstance(refused.error, NoSlotInTime)
    assert (refused.error.status, refused.error.retry_after_s) == (429, 1)
    first.stream.cancel()


async def test_without_a_card_plain_vllm_serves(redis_url: str, vllm: ScriptedVllm) -> None:
    broken = card_message()
    broken.tokenizer = b"{}"
    async with ScriptedDaemon(WILLING, card=broken).registered(redis_url), rig(redis_url, vllm) as made:
        assert await decide(made) == Plain("no_card")
        assert isinstance(await decide(made, DENY), Refusal)


async def test_the_models_own_defaults_reach_both_legs(redis_url: str, vllm: ScriptedVllm) -> None:
    daemon = ScriptedDaemon(WILLING, card=card_message(repetition_penalty=1.25, temperature=0.5))
    async with daemon.registered(redis_url), rig(redis_url, vllm) as made:
        decision = await decide(made)
        assert isinstance(decision, Prefill)
        prefill, (decode,) = json.loads(decision.body), daemon.requests
        assert (prefill["repetition_penalty"], prefill["temperature"]) == (1.25, 0.5)
        assert (decode.repetition_penalty, decode.temperature) == (1.25, 0.5)
        decision.stream.cancel()
