"""A slot for a request: leased, waited for where the client allows it, and reserved at its daemon; given back when not used."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace

import structlog

from gateway.cards import Card
from gateway.decode_client import DecodeClient, DecodeFailed, DecodeStream
from gateway.eligibility import Unsupported
from gateway.metrics import GatewayMetrics
from gateway.plan import Grammar, Plan, stop_ids
from gateway.pools import Pools
from gateway.settings import GatewaySettings
from gateway.slo import Wish
from gateway.stages import Stages
from gateway.tenants import tenant_of
from handoff import decode_pb2 as pb
from handoff.claim import Claim, ClaimKeys, SignedClaim, new_handoff_id, to_bytes
from leases import Denied, Grant, LeasesUnavailable, LeaseTable, NoSlot, SlotRequest

log = structlog.get_logger(__name__)

_ATTEMPTS = 2  # daemons asked before plain vLLM is taken
_LONGEST_RETRY_AFTER_S = 600
_SLACK_S = 1

NO_SLOT = {
    NoSlot.UNKNOWN_POOL: Unsupported("no_daemon", "no decode daemon serves this model"),
    NoSlot.TOO_LARGE: Unsupported("too_long", "prompt and answer are longer than any decode slot holds"),
    NoSlot.BUSY: Unsupported("no_free_slot", "no decode slot was free in time"),
    NoSlot.QUEUE_FULL: Unsupported("queue_full", "as many requests wait for a decode slot as may"),
    NoSlot.TENANT_LIMIT: Unsupported("tenant_limit", "this tenant uses as much of the decode pool as it may"),
}
DRAINING = Unsupported("draining", "this gateway is shutting down")
_DAEMON_UNAVAILABLE = Unsupported("daemon_unavailable", "no decode daemon took the request")

BeforeWait = Callable[[int], Awaitable[None]]
"""Told in how many seconds the decision is made at the latest, before a request that may wait asks for a slot."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a slot is wanted for: a whole answer, or the rest of one that other daemons have failed."""

    plan: Plan
    card: Card
    tokens: int  # prompt and answer: the slot must hold them
    max_tokens: int  # of the answer, the prefilled token among them; 0: the rest of the context
    answered: int = 0  # so many of the prompt's last ids are the answer's own
    failed: tuple[str, ...] = ()  # nodes that are not asked (again)
    speculate: bool = True


@dataclass(frozen=True, slots=True)
class Reserved:
    """A slot that its daemon holds for this request: `stream` must be read to its end or cancelled."""

    claim: SignedClaim
    stream: DecodeStream
    node_id: str


class Slots:
    """Takes slots for requests, and gives back what was not used. `draining`: takes none any more."""

    def __init__(
        self,
        settings: GatewaySettings,
        keys: ClaimKeys,
        table: LeaseTable,
        pools: Pools,
        client: DecodeClient,
        metrics: GatewayMetrics,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._table = table
        self._pools = pools
        self._client = client
        self._metrics = metrics
        self._undoing: set[asyncio.Task[None]] = set()
        self.draining = False

    def drain(self) -> None:
        """Take no slot any more; requests that wait for one go without it now."""
        self.draining = True
        self._table.hurry()

    async def settle(self) -> None:
        """Wait until the leases of requests that ended are given back; they need one call of the table each."""
        while self._undoing:
            await asyncio.wait(set(self._undoing))

    def _wait_ms(self, wish: Wish) -> int:
        """Return how long a request may wait for a slot: what it asks for, or the default, within the limit."""
        asked = self._settings.default_wait_ms if wish.wait_ms is None else wish.wait_ms
        return min(asked, self._settings.max_wait_ms)

    async def reserve(self, wish: Wish, wanted: Wanted, stages: Stages, before_wait: BeforeWait) -> Reserved | Unsupported:
        """Return a slot, or why there is none.

        All attempts share the time that the request may wait. Raises LeasesUnavailable.
        """
        wait_ms = self._wait_ms(wish)
        deadline = time.monotonic() + wait_ms / 1000
        if wait_ms and not self.draining:
            await before_wait(self._longest_s(wait_ms))
        return await self._first_willing(wish, wanted, deadline, stages)

    async def reserve_again(self, wish: Wish, wanted: Wanted) -> Reserved | Unsupported:
        """Return a slot that is free now for an answer that has begun, even while this gateway drains.

        Raises LeasesUnavailable.
        """
        return await self._first_willing(wish, wanted, time.monotonic(), Stages())

    async def _first_willing(self, wish: Wish, wanted: Wanted, deadline: float, stages: Stages) -> Reserved | Unsupported:
        avoid = list(wanted.failed)
        for _ in range(_ATTEMPTS):
            if self.draining and not wanted.failed:
                return DRAINING
            others = self._others(wanted.plan.model, avoid)
            left_ms = max(0, round((deadline - time.monotonic()) * 1000)) if others else 0
            granted = await self._acquire(self._request(wish, wanted, left_ms, avoid))
            stages.mark("slot")
            if isinstance(granted, Denied):
                return _DAEMON_UNAVAILABLE if avoid else self._why(granted)
            reserved = await self._open(granted, wanted)
            stages.mark("reserve")
            if reserved is not None:
                return reserved
            avoid.append(granted.node_id)
        return _DAEMON_UNAVAILABLE

    def _request(self, wish: Wish, wanted: Wanted, wait_ms: int, avoid: list[str]) -> SlotRequest:
        return SlotRequest(
            pool=wanted.plan.model,
            card=wanted.card.fingerprint,
            tokens=wanted.tokens,
            lease_ms=self._settings.lease_ms,
            wait_ms=wait_ms,
            max_waiting=self._settings.max_waiting,
            tenant=tenant_of(wish.tenant, self._settings),
            avoid=tuple(avoid),
        )

    def _longest_s(self, wait_ms: int) -> int:
        attempt_s = 2 * self._settings.leases_timeout_s + self._settings.reserve_timeout_s  # lease, reserve, give back
        return math.ceil(wait_ms / 1000 + _ATTEMPTS * attempt_s) + _SLACK_S

    def _others(self, model: str, avoid: list[str]) -> bool:
        """Whether the pool has a daemon that has not refused: only for such a one it makes sense to wait."""
        view = self._pools.get(model)
        return view is not None and view.nodes > len(avoid)

    def _why(self, denied: Denied) -> Unsupported:
        if self.draining and denied.reason is NoSlot.BUSY:
            return DRAINING  # it may have been cut short
        return replace(NO_SLOT[denied.reason], retry_after_s=_retry_after_s(denied.retry_after_ms))

    async def _acquire(self, request: SlotRequest) -> Grant | Denied:
        began, ended = time.perf_counter(), "denied"
        try:
            granted = await self._table.acquire(request)
            if isinstance(granted, Grant):
                ended = "granted"
            elif granted.reason is NoSlot.BUSY and not self.draining:
                ended = "timeout"
            return granted
        except asyncio.CancelledError:
            ended = "left"
            raise
        finally:
            if request.wait_ms:
                self._metrics.slot_wait_seconds.labels(ended).observe(time.perf_counter() - began)

    async def _open(self, grant: Grant, wanted: Wanted) -> Reserved | Unsupported | None:
        """Reserve the granted slot; None, the lease given back, when the daemon does not, and others may."""
        reserved = False
        try:
            claim = self._claim(grant)
            request = _decode_request(claim, wanted)
            stream = await self._client.reserve(grant.decode_endpoint, request, self._settings.reserve_timeout_s)
            reserved = True
            return Reserved(claim, stream, grant.node_id)
        except DecodeFailed as error:
            if error.code == "grammar_unsupported":
                # Of the same model and version, no other daemon would say anything else.
                grammar = wanted.plan.grammar
                return Unsupported("unsupported_grammar", error.said, None if grammar is None else grammar.param)
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

    async def _give_back(self, grant: Grant) -> None:
        try:
            await self._table.give_back(grant)
        except LeasesUnavailable as error:
            log.warning("lease not given back; it runs out by itself", node=grant.node_id, error=str(error))

    def _claim(self, grant: Grant) -> SignedClaim:
        return self._keys.sign(
            Claim(
                handoff_id=new_handoff_id(),
                host=grant.control_host,
                port=grant.control_port,
                slot=grant.slot,
                epoch=grant.epoch,
                expires=int(time.time()) + self._settings.claim_lifetime_s,
            )
        )


def _retry_after_s(estimate_ms: int | None) -> int:
    """Return whole seconds: 1 where the table knows nothing yet, and never more than anybody would believe."""
    return max(1, min(_LONGEST_RETRY_AFTER_S, math.ceil((estimate_ms or 0) / 1000)))


def _decode_request(signed: SignedClaim, wanted: Wanted) -> pb.DecodeRequest:
    claim, plan, card = signed.claim, wanted.plan, wanted.card
    sampling = plan.sampling
    return pb.DecodeRequest(
        handoff_id=claim.handoff_id,
        slot=claim.slot,
        epoch=claim.epoch,
        claim=to_bytes(signed),
        max_tokens=wanted.max_tokens,
        answered=wanted.answered,
        stop_token_ids=sorted(stop_ids(sampling, card)),
        ending_token_ids=sorted({*card.stop_token_ids, *sampling.stop_token_ids}),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=[pb.TokenIds(ids=ids) for ids in sampling.bad_word_ids],
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        grammar=None if plan.grammar is None else _grammar(plan.grammar),
        speculation=pb.DecodeRequest.AS_SET if wanted.speculate else pb.DecodeRequest.OFF,
    )


def _grammar(grammar: Grammar) -> pb.Grammar:
    return pb.Grammar(kind=grammar.kind.value, source=grammar.source)
