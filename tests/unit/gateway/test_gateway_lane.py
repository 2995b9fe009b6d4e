"""The request phase on a real lease table: who is served where, and that nothing acquired is kept."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.endpoints import Endpoint
from gateway.errors import BadRequest, LaneUnavailable, NoSlotInTime
from gateway.lane import Plain, Prefill, Refusal
from gateway.slo import SloClass, Wish
from handoff.claim import from_params
from leases import Denied, Grant, LeaseTable, Node, NodeStatus, SlotRequest, SlotView
from tests.kit.gateway import CREDENTIALS, MODEL, bpe_tokenizer, card_message, chat, end_id
from tests.kit.legs import ScriptedDaemon, ScriptedVllm, Step, answers, failed, hangs, landed, reserved
from tests.kit.rig import Rig, rig
from tests.kit.valkey import ValkeyProcess, eventually

ALLOW, DENY = Wish(SloClass.LATENCY, fallback=True), Wish(SloClass.LATENCY, fallback=False)
CHAT = "/v1/chat/completions"
WILLING: tuple[Step, ...] = (reserved(), "hang")


@pytest.fixture
async def lane(redis_url: str, vllm: ScriptedVllm) -> AsyncIterator[Rig]:
    """One willing daemon of one slot."""
    async with ScriptedDaemon(WILLING).registered(redis_url), rig(redis_url, vllm) as made:
        yield made


async def decide(made: Rig, wish: Wish = ALLOW, **fields: Any) -> Plain | Refusal | Prefill:
    return await made.decide(wish, **fields)


async def all_free(made: Rig, slots: int = 1, within_s: float = 1) -> None:
    async def free() -> bool:
        return await made.free_slots() == slots

    await eventually(free, within_s=within_s)


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


async def test_a_slot_too_small_for_the_context_is_plain_vllms(redis_url: str, vllm: ScriptedVllm) -> None:
    async with ScriptedDaemon(WILLING).serving() as daemon, LeaseTable(redis_url, timeout_s=5) as table:
        node = Node("n", MODEL, "card-1", daemon.endpoint, "127.0.0.1", 1, 100, 1)
        await table.register(node, NodeStatus(), [SlotView(0, 0, None)])
        async with rig(redis_url, vllm) as made:
            assert await decide(made) == Plain("too_long")
            assert isinstance(await decide(made, DENY), Refusal)
            assert await made.free_slots() == 1


class TestLength:
    """Context 4096; a prompt of so many characters, in a body that many bytes longer, with an answer of nine tokens."""

    CONTEXT = 4096
    LONGEST = max(len(token) for token in bpe_tokenizer().get_vocab())

    async def test_a_prompt_that_surely_fits_is_not_counted(self, lane: Rig) -> None:
        served = await decide(lane, messages=[{"role": "user", "content": "x" * 3000}])
        assert isinstance(served, Prefill)
        served.stream.cancel()
        assert lane.vllm.asked == []

    async def test_a_prompt_that_surely_does_not_fit_is_not_counted_either(self, lane: Rig) -> None:
        sure = self.CONTEXT * self.LONGEST
        assert await decide(lane, messages=[{"role": "user", "content": "x" * sure}]) == Plain("too_long")
        assert lane.vllm.asked == []

    @pytest.mark.parametrize(("tokens", "fits"), [(4096 - 9, True), (4096 - 1, True), (4096, False)])
    async def test_between_the_bounds_vllm_counts_with_the_clients_credentials(
        self, lane: Rig, tokens: int, fits: bool
    ) -> None:
        lane.vllm.answers["/tokenize"] = answers({"tokens": [1] * tokens})
        decision = await decide(lane, messages=[{"role": "user", "content": "x" * 4000}])
        (asked,) = lane.vllm.asked
        assert (asked.path, asked.headers["authorization"]) == ("/tokenize", "Bearer client")
        if fits:
            assert isinstance(decision, Prefill)
            decision.stream.cancel()
        else:
            assert decision == Plain("too_long")

    async def test_a_prompt_that_vllm_refuses_to_count_is_its_own_to_refuse(self, lane: Rig) -> None:
        lane.vllm.answers["/tokenize"] = answers({"error": {}}, 400)
        assert await decide(lane, messages=[{"role": "user", "content": "x" * 4000}]) == Plain("refused_by_vllm")

    @pytest.mark.parametrize("handler", [hangs, answers({}, 503), answers(b"x"), answers({"tokens": [None]})])
    async def test_a_prompt_that_nobody_counts_is_plain_vllms_in_time(self, redis_url: str, handler: Any) -> None:
        async with (
            ScriptedDaemon(WILLING).registered(redis_url),
            ScriptedVllm({"/tokenize": handler}).serving() as vllm,
            rig(redis_url, vllm, tokenize_timeout_s=0.2) as made,
            asyncio.timeout(3),
        ):
            assert await decide(made, messages=[{"role": "user", "content": "x" * 4000}]) == Plain("prompt_not_counted")
            assert await made.free_slots() == 1

    async def test_without_a_limit_or_with_one_that_leaves_no_room_the_whole_context_is_asked_for(self, lane: Rig) -> None:
        asked: list[int] = []
        acquire = lane.parts.table.acquire

        async def noting(request: SlotRequest) -> Grant | Denied:
            asked.append(request.tokens)
            return await acquire(request)

        lane.parts.table.acquire = noting  # type: ignore[method-assign]
        for limit in (None, 50, self.CONTEXT):
            served = await decide(lane, max_tokens=limit)
            assert isinstance(served, Prefill)
            served.stream.cancel()
            await all_free(lane)
        assert asked[0] == asked[2] == self.CONTEXT
        assert asked[1] == len(json.dumps(chat(max_tokens=50))) + 512 + 50


UNWILLING: dict[str, tuple[Step, ...]] = {
    "refuses": (failed("slot_busy"),),
    "dies": ("die",),
    "says_something_else": (landed(1), "hang"),
    "ends": (),
    "never_answers": ("hang",),
}


@pytest.mark.parametrize("script", UNWILLING.values(), ids=UNWILLING.keys())
async def test_a_daemon_that_does_not_reserve_costs_no_slot_and_plain_vllm_serves(
    redis_url: str, vllm: ScriptedVllm, script: Any
) -> None:
    async with ScriptedDaemon(script).registered(redis_url), rig(redis_url, vllm, reserve_timeout_s=0.2) as made:
        assert await decide(made) == Plain("daemon_unavailable")
        await all_free(made)
        refused = await decide(made, DENY)
        assert isinstance(refused, Refusal)
        assert refused.error.status == 503
        await all_free(made)


@pytest.mark.parametrize("script", UNWILLING.values(), ids=UNWILLING.keys())
async def test_another_daemon_takes_the_request_that_one_did_not(redis_url: str, vllm: ScriptedVllm, script: Any) -> None:
    # The smaller slot that fits is granted first.
    bad, good = ScriptedDaemon(script, capacity=2048), ScriptedDaemon(WILLING)
    async with bad.registered(redis_url), good.registered(redis_url), rig(redis_url, vllm, reserve_timeout_s=0.2) as made:
        decision = await decide(made)
        assert isinstance(decision, Prefill)
        assert len(bad.requests) == 1
        assert decision.stream.endpoint == good.endpoint
        decision.stream.cancel()
        await all_free(made, slots=2)


async def test_a_dead_daemon_that_is_still_listed_is_found_before_any_prefill(redis_url: str, vllm: ScriptedVllm) -> None:
    daemon = ScriptedDaemon(WILLING)
    async with daemon.registered(redis_url), rig(redis_url, vllm) as made:
        assert daemon.node is not None
        dead = type(daemon.node)("dead", MODEL, "card-1", "127.0.0.1:1", "127.0.0.1", 1, 4096, 1)
        async with LeaseTable(redis_url, timeout_s=5) as table:
            await table.register(dead, NodeStatus(), [SlotView(0, 0, None)])
        await daemon_alone_serves(made, daemon)


async def daemon_alone_serves(made: Rig, daemon: ScriptedDaemon) -> None:
    for _ in range(3):
        decision = await decide(made)
        assert isinstance(decision, Prefill)
        assert decision.stream.endpoint == daemon.endpoint
        decision.stream.cancel()
        await all_free(made, slots=2)


async def test_a_slot_of_another_card_is_given_back(redis_url: str, vllm: ScriptedVllm) -> None:
    async with ScriptedDaemon(WILLING).registered(redis_url) as old, rig(redis_url, vllm) as made:
        new = ScriptedDaemon(WILLING, card=card_message(fingerprint="card-2", context_tokens=1024))
        async with new.registered(redis_url):
            decision = await decide(made)  # 1024 is the smaller fit, and is tried first
            assert isinstance(decision, Prefill)
            assert decision.stream.endpoint == old.endpoint
            assert new.requests == []
            decision.stream.cancel()
            await all_free(made, slots=2)


async def test_without_redis_plain_vllm_serves_within_the_tables_time(own_valkey: ValkeyProcess, vllm: ScriptedVllm) -> None:
    async with ScriptedDaemon(WILLING).registered(own_valkey.url), rig(own_valkey.url, vllm, leases_timeout_s=0.3) as made:
        own_valkey.freeze()
        try:
            began = time.monotonic()
            assert await decide(made) == Plain("leases_unavailable")
            assert time.monotonic() - began < 2
            refused = await decide(made, DENY)
        finally:
            own_valkey.thaw()
        assert isinstance(refused, Refusal)
        assert refused.error.status == 503
    own_valkey.stop()


async def test_a_request_cancelled_anywhere_leaves_no_slot_behind(redis_url: str, vllm: ScriptedVllm) -> None:
    chance = random.Random(1)
    async with ScriptedDaemon(WILLING, slots=3).registered(redis_url), rig(redis_url, vllm) as made:
        took = []
        for _ in range(5):
            began = time.perf_counter()
            await served_and_left(made)
            took.append(time.perf_counter() - began)
            await all_free(made, slots=3)
        for _ in range(60):
            tasks = [asyncio.create_task(served_and_left(made)) for _ in range(3)]
            await asyncio.wait(tasks, timeout=chance.uniform(0, 1.5 * max(took)))
            for task in tasks:
                task.cancel()
                if chance.random() < 0.3:
                    await asyncio.sleep(0)
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await made.lane.settle()
        await all_free(made, slots=3, within_s=2)


async def served_and_left(made: Rig) -> None:
    decision = await decide(made)
    if isinstance(decision, Prefill):
        decision.stream.cancel()


async def test_a_request_cancelled_again_while_it_gives_back_does_give_back(redis_url: str, vllm: ScriptedVllm) -> None:
    daemon = ScriptedDaemon(("hang",))
    async with daemon.registered(redis_url), rig(redis_url, vllm, reserve_timeout_s=30) as made:
        give_back, giving_back, go_on = made.parts.table.give_back, asyncio.Event(), asyncio.Event()

        async def slow(grant: Grant) -> bool:
            giving_back.set()
            await go_on.wait()
            return await give_back(grant)

        made.parts.table.give_back = slow  # type: ignore[method-assign]
        deciding = asyncio.create_task(decide(made))

        async def asked() -> bool:
            return bool(daemon.requests)

        await eventually(asked)
        deciding.cancel()
        await giving_back.wait()
        deciding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await deciding
        go_on.set()
        await made.lane.settle()
        await all_free(made)


async def test_a_lease_that_cannot_be_given_back_is_no_error(redis_url: str, vllm: ScriptedVllm) -> None:
    async with (
        ScriptedDaemon(UNWILLING["refuses"]).registered(redis_url),
        rig(redis_url, vllm) as made,
        LeaseTable("unix:///nowhere.sock", timeout_s=0.2) as away,
    ):
        made.parts.table.give_back = away.give_back  # type: ignore[method-assign]
        assert await decide(made) == Plain("daemon_unavailable")
