"""The lane's request phase: decide, lease, reserve, rewrite. Whatever it cannot do, plain vLLM does, with a counted reason."""

from dataclasses import dataclass

import structlog

from gateway.body import Body, NotAnObject
from gateway.cards import Card, Cards
from gateway.decode_client import DecodeClient, DecodeStream
from gateway.eligibility import CHAT_PATH, Unsupported, prompt_characters, why_not
from gateway.errors import BadRequest, GatewayError, LaneUnavailable, NoSlotInTime
from gateway.metrics import GatewayMetrics
from gateway.plan import Plan, make_plan, prefill_body
from gateway.pools import Pools
from gateway.settings import GatewaySettings
from gateway.slo import SloClass, Wish
from gateway.slots import DRAINING, NO_SLOT, BeforeWait, Slots
from gateway.stages import Stages
from gateway.upstream import Credentials, Upstream, UpstreamUnavailable
from handoff.claim import ClaimKeys
from leases import LeasesUnavailable, LeaseTable, NoSlot

log = structlog.get_logger(__name__)

_UNAVAILABLE = frozenset({"no_daemon", "no_card", "leases_unavailable", "prompt_not_counted", "daemon_unavailable", "draining"})
_COME_AGAIN = frozenset({"no_free_slot", "queue_full", "tenant_limit"})


@dataclass(frozen=True, slots=True)
class Plain:
    """The original request goes to vLLM untouched."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """The client gets this error; vLLM is not asked."""

    reason: str
    error: GatewayError


@dataclass(frozen=True, slots=True)
class Prefill:
    """The rewritten request goes to vLLM; its answer comes back to a relay."""

    body: bytes
    original: Body
    plan: Plan
    card: Card
    stream: DecodeStream
    stages: Stages
    credentials: Credentials


@dataclass(frozen=True, slots=True)
class LaneParts:
    """What the lane works with."""

    settings: GatewaySettings
    keys: ClaimKeys
    table: LeaseTable
    pools: Pools
    cards: Cards
    client: DecodeClient
    upstream: Upstream
    metrics: GatewayMetrics


async def _no_matter(seconds: int) -> None:
    """Nobody else counts the time of this decision."""


class LatencyLane:
    """Decides on requests that carry the class header."""

    def __init__(self, parts: LaneParts) -> None:
        self.parts = parts
        self._slots = Slots(parts.settings, parts.keys, parts.table, parts.pools, parts.client, parts.metrics)

    def early(self, wish: Wish, method: str, path: str, *, has_body: bool) -> Plain | Refusal | None:
        """Decide by headers alone where that is enough, so that the body need not be looked at."""
        if wish.slo_class is SloClass.UNKNOWN:
            return self._not_served(
                wish, Unsupported("unknown_class", "x-slo-class is neither latency nor throughput", "x-slo-class")
            )
        if wish.slo_class is SloClass.THROUGHPUT:
            return Plain("throughput_class")
        if method != "POST" or path.partition("?")[0] != CHAT_PATH:
            return self._not_served(wish, Unsupported("unsupported_path", f"the latency lane serves POST {CHAT_PATH} only"))
        if self._slots.draining:
            return self._not_served(wish, DRAINING)
        return None if has_body else Plain("no_body")  # vLLM says what is missing

    async def decide(
        self, wish: Wish, raw: bytes, credentials: Credentials, before_wait: BeforeWait = _no_matter
    ) -> Plain | Refusal | Prefill:
        """Decide on a chat completion. A Prefill holds a reserved slot: its stream must be read to its end or cancelled.

        Takes longer than the settings' timeouts only for a request that may wait for a slot; then `before_wait` is called
        first. Cancelled, it gives back what it holds.
        """
        stages = Stages()
        if len(raw) > min(self.parts.cards.longest_body(), self.parts.settings.longest_body_bytes):
            return self._not_served(wish, NO_SLOT[NoSlot.TOO_LARGE])  # parsing it would stall everybody's tokens
        try:
            body = Body(raw)
        except NotAnObject:
            # vLLM says what is wrong with it.
            return self._not_served(wish, Unsupported("invalid_json", "the body is no JSON object in UTF-8"))
        try:
            outcome = await self._prepare(wish, body, stages, credentials, before_wait)
        except LeasesUnavailable as error:
            log.warning("lease table unavailable", error=str(error))
            outcome = Unsupported("leases_unavailable", "the lease table is away")
        except UpstreamUnavailable as error:
            log.warning("prompt not counted", error=str(error))
            outcome = Unsupported("prompt_not_counted", "vLLM did not count the prompt")
        if isinstance(outcome, Unsupported):
            return self._not_served(wish, outcome)
        return outcome

    def drain(self) -> None:
        """Take no more requests, and let those that wait for a slot go without one; running streams go on."""
        self._slots.drain()

    async def settle(self) -> None:
        """Wait until the leases of requests that ended are given back."""
        await self._slots.settle()

    def count(self, wish: Wish, lane: str, outcome: str, reason: str) -> None:
        """Count a request once, when it is known how it was served."""
        self.parts.metrics.requests.labels(wish.slo_class, lane, outcome, reason).inc()

    def _not_served(self, wish: Wish, why: Unsupported) -> Plain | Refusal:
        if wish.fallback:
            return Plain(why.reason)
        if why.reason in _COME_AGAIN:
            return Refusal(why.reason, NoSlotInTime(why.detail, code=why.reason, retry_after_s=why.retry_after_s))
        if why.reason in _UNAVAILABLE:
            return Refusal(why.reason, LaneUnavailable(why.detail, code=why.reason, retry_after_s=why.retry_after_s))
        return Refusal(why.reason, BadRequest(f"{why.detail} (x-slo-fallback is deny)", code=why.reason, param=why.param))

    async def _prepare(
        self, wish: Wish, body: Body, stages: Stages, credentials: Credentials, before_wait: BeforeWait
    ) -> Prefill | Unsupported:
        unsupported = why_not(body)
        if unsupported is not None:
            return unsupported
        view = self.parts.pools.get(body.get("model"))
        if view is None:
            return NO_SLOT[NoSlot.UNKNOWN_POOL]
        card = next((card for name in sorted(view.cards) if (card := self.parts.cards.get(name)) is not None), None)
        if card is None:
            return Unsupported("no_card", "the daemons' model card is not here yet")
        plan = make_plan(body, card)
        if isinstance(plan, Unsupported):
            return plan
        tokens = await self._tokens(body, plan, card, credentials)
        if isinstance(tokens, Unsupported):
            return tokens
        stages.mark("decide")
        reserved = await self._slots.reserve(wish, plan, card, tokens, stages, before_wait)
        if isinstance(reserved, Unsupported):
            return reserved
        try:
            return Prefill(prefill_body(body, plan, reserved.claim), body, plan, card, reserved.stream, stages, credentials)
        except BaseException:
            reserved.stream.cancel()
            raise

    async def _tokens(self, body: Body, plan: Plan, card: Card, credentials: Credentials) -> int | Unsupported:
        """Return the tokens a slot must hold.

        No token is shorter than a byte or longer than the vocabulary's longest: that bounds the prompt on both sides, and vLLM
        is asked only where the bounds do not settle it.
        """
        answer = plan.max_tokens or 1
        if prompt_characters(body) // card.longest_token + answer > card.context_tokens:
            return NO_SLOT[NoSlot.TOO_LARGE]
        bound = len(body.raw) + self.parts.settings.template_tokens + answer
        if bound > card.context_tokens:
            prompt = await self.parts.upstream.prompt_ids(body, credentials)
            if prompt is None:
                return Unsupported("refused_by_vllm", "vLLM cannot tokenize this request")
            bound = len(prompt) + answer
            if bound > card.context_tokens:
                return NO_SLOT[NoSlot.TOO_LARGE]
        return card.context_tokens if plan.max_tokens is None else bound
