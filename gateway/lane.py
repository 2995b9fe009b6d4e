"""The lane's request phase: decide, lease, reserve, rewrite. Whatever it cannot do, plain vLLM does, with a counted reason."""

import asyncio
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field

import structlog

from gateway.body import Body, NotAnObject
from gateway.cards import Card, Cards
from gateway.decode_client import DecodeClient, DecodeFailed, DecodeStream
from gateway.eligibility import CHAT_PATH, Unsupported, prompt_characters, why_not
from gateway.errors import BadRequest, GatewayError, LaneUnavailable, NoSlotInTime
from gateway.metrics import GatewayMetrics
from gateway.plan import Plan, make_plan, prefill_body
from gateway.pools import Pools
from gateway.settings import GatewaySettings
from gateway.slo import SloClass, Wish
from gateway.upstream import Credentials, Upstream, UpstreamUnavailable
from handoff import decode_pb2 as pb
from handoff.claim import Claim, ClaimKeys, SignedClaim, new_handoff_id, to_bytes
from leases import Grant, LeasesUnavailable, LeaseTable, NoSlot

log = structlog.get_logger(__name__)

_ATTEMPTS = 2  # daemons asked before plain vLLM is taken
_RETRY_AFTER_S = 1
_UNAVAILABLE = frozenset({"no_daemon", "no_card", "leases_unavailable", "prompt_not_counted", "daemon_unavailable", "draining"})

_NO_SLOT = {
    NoSlot.UNKNOWN_POOL: Unsupported("no_daemon", "no decode daemon serves this model"),
    NoSlot.BUSY: Unsupported("no_free_slot", "every decode slot is taken"),
    NoSlot.TOO_LARGE: Unsupported("too_long", "prompt and answer are longer than any decode slot holds"),
}


@dataclass(frozen=True, slots=True)
class Plain:
    """The original request goes to vLLM untouched."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """The client gets this error; vLLM is not asked."""

    reason: str
    error: GatewayError


@dataclass(slots=True)
class Stages:
    """Seconds of a request's stages, in the order they happened."""

    began: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def mark(self, stage: str) -> None:
        """End a stage that began where the last one ended."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def header(self) -> str:
        """Return a server-timing value, in milliseconds."""
        return ", ".join(f"{stage};dur={seconds * 1000:.1f}" for stage, seconds in self.seconds.items())


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


class LatencyLane:
    """Decides on requests that carry the class header."""

    def __init__(self, parts: LaneParts) -> None:
        self.parts = parts
        self.draining = False
        self._undoing: set[asyncio.Task[None]] = set()

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
        if self.draining:
            return self._not_served(wish, Unsupported("draining", "this gateway is shutting down"))
        return None if has_body else Plain("no_body")  # vLLM says what is missing

    async def decide(self, wish: Wish, raw: bytes, credentials: Credentials) -> Plain | Refusal | Prefill:
        """Decide on a chat completion. A Prefill holds a reserved slot: its stream must be read to its end or cancelled."""
        stages = Stages()
        if len(raw) > min(self.parts.cards.longest_body(), self.parts.settings.longest_body_bytes):
            return self._not_served(wish, _NO_SLOT[NoSlot.TOO_LARGE])  # parsing it would stall everybody's tokens
        try:
            body = Body(raw)
        except NotAnObject:
            # vLLM says what is wrong with it.
            return self._not_served(wish, Unsupported("invalid_json", "the body is no JSON object in UTF-8"))
        try:
            outcome = await self._prepare(body, stages, credentials)
        except LeasesUnavailable as error:
            log.warning("lease table unavailable", error=str(error))
            outcome = Unsupported("leases_unavailable", "the lease table is away")
        except UpstreamUnavailable as error:
            log.warning("prompt not counted", error=str(error))
            outcome = Unsupported("prompt_not_counted", "vLLM did not count the prompt")
        if isinstance(outcome, Unsupported):
            return self._not_served(wish, outcome)
        return outcome

    async def settle(self) -> None:
        """Wait until the leases of requests that ended are given back."""
        while self._undoing:
            await asyncio.wait(set(self._undoing))

    def count(self, wish: Wish, lane: str, outcome: str, reason: str) -> None:
        """Count a request once, when it is known how it was served."""
        self.parts.metrics.requests.labels(wish.slo_class, lane, outcome, reason).inc()

    def _not_served(self, wish: Wish, why: Unsupported) -> Plain | Refusal:
        if wish.fallback:
            return Plain(why.reason)
        if why.reason == "no_free_slot":
            return Refusal(why.reason, NoSlotInTime(why.detail, code=why.reason, retry_after_s=_RETRY_AFTER_S))
        if why.reason in _UNAVAILABLE:
            return Refusal(why.reason, LaneUnavailable(why.detail, code=why.reason, retry_after_s=_RETRY_AFTER_S))
        return Refusal(why.reason, BadRequest(f"{why.detail} (x-slo-fallback is deny)", code=why.reason, param=why.param))

    async def _prepare(self, body: Body, stages: Stages, credentials: Credentials) -> Prefill | Unsupported:
        unsupported = why_not(body)
        if unsupported is not None:
            return unsupported
        view = self.parts.pools.get(body.get("model"))
        if view is None:
            return _NO_SLOT[NoSlot.UNKNOWN_POOL]
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
        claimed = await self._reserve(plan, card, tokens, stages)
        if isinstance(claimed, Unsupported):
            return claimed
        claim, stream = claimed
        try:
            return Prefill(prefill_body(body, plan, claim), body, plan, card, stream, stages, credentials)
        except BaseException:
            stream.cancel()
            raise

    async def _tokens(self, body: Body, plan: Plan, card: Card, credentials: Credentials) -> int | Unsupported:
        """Return the tokens a slot must hold.

        No token is shorter than a byte or longer than the vocabulary's longest: that bounds the prompt on both sides, and vLLM
        is asked only where the bounds do not settle it.
        """
        answer = plan.max_tokens or 1
        if prompt_characters(body) // card.longest_token + answer > card.context_tokens:
            return _NO_SLOT[NoSlot.TOO_LARGE]
        bound = len(body.raw) + self.parts.settings.template_tokens + answer
        if bound > card.context_tokens:
            prompt = await self.parts.upstream.prompt_ids(body, credentials)
            if prompt is None:
                return Unsupported("refused_by_vllm", "vLLM cannot tokenize this request")
            bound = len(prompt) + answer
            if bound > card.context_tokens:
                return _NO_SLOT[NoSlot.TOO_LARGE]
        return card.context_tokens if plan.max_tokens is None else bound

    async def _reserve(
        self, plan: Plan, card: Card, tokens: int, stages: Stages
    ) -> tuple[SignedClaim, DecodeStream] | Unsupported:
        avoid: list[str] = []
        for _ in range(_ATTEMPTS):
            grant = await self._acquire(plan.model, tokens, avoid)
            stages.mark("slot")
            if isinstance(grant, NoSlot):
                return _NO_SLOT[grant] if not avoid else Unsupported("daemon_unavailable", "no decode daemon took the request")
            claim = self._claim(grant)
            stream = await self._open(grant, plan, card, claim)
            if stream is not None:
                stages.mark("reserve")
                return claim, stream
            avoid.append(grant.node_id)
        return Unsupported("daemon_unavailable", "no decode daemon took the request")

    async def _acquire(self, model: str, tokens: int, avoid: list[str]) -> Grant | NoSlot:
        acquiring = asyncio.create_task(
            self.parts.table.acquire(model, tokens, uuid.uuid4().hex, self.parts.settings.lease_ms, avoid=avoid)
        )
        try:
            return await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            self._undo(self._give_back_acquired(acquiring))
            raise

    async def _open(self, grant: Grant, plan: Plan, card: Card, claim: SignedClaim) -> DecodeStream | None:
        """Reserve the granted slot; None, the lease given back, when the daemon does not."""
        reserved = False
        try:
            if grant.card != card.fingerprint:
                return None  # the pool is being replaced; another node may have the card that was planned with
            stream = await self.parts.client.reserve(
                grant.decode_endpoint, _decode_request(claim, plan, card), self.parts.settings.reserve_timeout_s
            )
            reserved = True
            return stream
        except DecodeFailed as error:
            log.warning("daemon did not reserve", node=grant.node_id, code=error.code, error=str(error))
            return None
        finally:
            if not reserved:
                # Shielded: this request may be cancelled, and cancelled again.
                await asyncio.shield(self._undo(self._give_back(grant)))

    def _undo(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)
        return task

    async def _give_back_acquired(self, acquiring: asyncio.Task[Grant | NoSlot]) -> None:
        try:
            grant = await acquiring
        except LeasesUnavailable:
            return  # what was leased all the same runs out by itself
        if isinstance(grant, Grant):
            await self._give_back(grant)

    async def _give_back(self, grant: Grant) -> None:
        try:
            await self.parts.table.release(grant.pool, grant.node_id, grant.slot, grant.epoch)
        except LeasesUnavailable as error:
            log.warning("lease not given back; it runs out by itself", node=grant.node_id, error=str(error))

    def _claim(self, grant: Grant) -> SignedClaim:
        return self.parts.keys.sign(
            Claim(
                handoff_id=new_handoff_id(),
                host=grant.control_host,
                port=grant.control_port,
                slot=grant.slot,
                epoch=grant.epoch,
                expires=int(time.time()) + self.parts.settings.claim_lifetime_s,
            )
        )


def _decode_request(signed: SignedClaim, plan: Plan, card: Card) -> pb.DecodeRequest:
    claim, sampling = signed.claim, plan.sampling
    return pb.DecodeRequest(
        handoff_id=claim.handoff_id,
        slot=claim.slot,
        epoch=claim.epoch,
        max_tokens=plan.max_tokens or 0,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop_token_ids=() if sampling.ignore_eos else card.stop_token_ids,
        claim=to_bytes(signed),
    )
