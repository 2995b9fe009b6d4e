"""A request is served where prompt and answer fit: vLLM counts the prompt only where its text does not settle that."""

import asyncio
import json
from typing import Any

import pytest

from gateway.lane import Plain, Prefill, Refusal
from leases import Denied, Grant, LeaseTable, Node, NodeStatus, SlotRequest, SlotView
from tests.kit.deciding import DENY, WILLING, all_free, decide
from tests.kit.gateway import MODEL, bpe_tokenizer, chat
from tests.kit.legs import ScriptedDaemon, ScriptedVllm, answers, hangs
from tests.kit.rig import Rig, rig


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
