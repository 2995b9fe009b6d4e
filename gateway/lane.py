"""The lane's request phase: decide, lease, reserve, rewrite. Whatever it cannot do, plain vLLM does, with a counted reason."""

from dataclasses import dataclass, replace

import structlog

from gateway.body import Body, NotAnObject
from gateway.cards import Card, Cards
from gateway.decode_client import DecodeClient, DecodeStream
from gateway.eligibility import Unsupported, why_not
from gateway.endpoints import Endpoint
from gateway.errors import BadRequest, GatewayError, LaneUnavailable, NoSlotInTime
from gateway.metrics import GatewayMetrics
from gateway.plan import Form, Plan, make_plan, prefill_body
from gateway.pools import Pools
from gateway.prompts import PromptBounds, prompt_bounds, tokenize_body
from gateway.rendering import Rendered, render
from gateway.serving import Servings
from gateway.settings import GatewaySettings
from gateway.slo import SloClass, Wish
from gateway.slots import DRAINING, NO_SLOT, BeforeWait, Slots, Wanted
from gateway.stages import Stages
from gateway.upstream import Credentials, Upstream, UpstreamUnavailable
from handoff.claim import ClaimKeys
from leases import LeasesUnavailable, LeaseTable, NoSlot

log = structlog.get_logger(__name__)

_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
_UNSUPPORTED_PATH = Unsupported("unsupported_path", f"the latency lane serves POST {' and '.join(_ENDPOINTS)} only")
_REASONING = Unsupported("reasoning_parser", "vLLM's parser of reasoning makes the answer")
_UNAVAILABLE = frozenset(
    {"no_daemon", "no_card", "leases_unavailable", "prompt_not_counted", "daemon_unavailable", "draining"}
    | {"derender_unavailable", "vllm_configured_otherwise"}
)
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
    node_id: str  # the daemon's
    wish: Wish
    stages: Stages
    credentials: Credentials
    rendered: Rendered | None = None  # where vLLM's parsers make the answer


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
    slots: Slots
    servings: Servings


def make_parts(
    settings: GatewaySettings,
    *,
    table: LeaseTable,
    pools: Pools,
    cards: Cards,
    client: DecodeClient,
    upstream: Upstream,
    metrics: GatewayMetrics,
) -> LaneParts:
    """Return the lane's parts, given those that must be opened and closed."""
    keys = ClaimKeys(settings.signing_keys)
    slots = Slots(settings, keys, table, pools, client, metrics)
    return LaneParts(settings, keys, table, pools, cards, client, upstream, metrics, slots, Servings(settings))


async def _no_matter(seconds: int) -> None:
    """Nobody else counts the time of this decision."""


class LatencyLane:
    """Decides on requests that carry the class header."""

    def __init__(self, parts: LaneParts) -> None:
        self.parts = parts

    def early(self, wish: Wish, method: str, path: str, *, has_body: bool) -> Plain | Refusal | Endpoint:
        """Decide by headers alone where that is enough; returns the endpoint where the body must be looked at."""
        if wish.slo_class is SloClass.UNKNOWN:
            return self._not_served(
                wish, Unsupported("unknown_class", "x-slo-class is neither latency nor throughput", "x-slo-class")
            )
        if wish.slo_class is SloClass.THROUGHPUT:
            return Plain("throughput_class")
        endpoint = _ENDPOINTS.get(path.partition("?")[0]) if method == "POST" else None
        if endpoint is None:
            return self._not_served(wish, _UNSUPPORTED_PATH)
        if self.parts.slots.draining:
            return self._not_served(wish, DRAINING)
        return endpoint if has_body else Plain("no_body")  # vLLM says what is missing

    async def decide(
        self, wish: Wish, endpoint: Endpoint, raw: bytes, credentials: Credentials, before_wait: BeforeWait = _no_matter
    ) -> Plain | Refusal | Prefill:
        """Decide on a request. A Prefill holds a reserved slot: its stream must be read to its end or cancelled.

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
            outcome = await self._prepare(wish, endpoint, body, stages, credentials, before_wait)
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
        self.parts.slots.drain()

    async def settle(self) -> None:
        """Wait until the leases of requests that ended are given back."""
        await self.parts.slots.settle()

    def count(self, wish: Wish, lane: str, outcome: str, reason: str) -> None:
        """Count a request once, when it is known how it was served."""
        self.parts.metrics.requests.labels(wish.slo_class, lane, outcome, reason).inc()

    def _not_served(self, wish: Wish, why: Unsupported) -> Plain | Refusal:
        if wish.fallback or why.reason == "refused_by_vllm":  # vLLM says itself what is wrong
            return Plain(why.reason)
        if why.reason in _COME_AGAIN:
            return Refusal(why.reason, NoSlotInTime(why.detail, code=why.reason, retry_after_s=why.retry_after_s))
        if why.reason in _UNAVAILABLE:
            return Refusal(why.reason, LaneUnavailable(why.detail, code=why.reason, retry_after_s=why.retry_after_s))
        return Refusal(why.reason, BadRequest(f"{why.detail} (x-slo-fallback is deny)", code=why.reason, param=why.param))

    async def _prepare(
        self, wish: Wish, endpoint: Endpoint, body: Body, stages: Stages, credentials: Credentials, before_wait: BeforeWait
    ) -> Prefill | Unsupported:
        planned = self._plan(endpoint, body)
        if isinstance(planned, Unsupported):
            return planned
        plan, card = planned
        rendered = await self._render(body, credentials) if plan.parsed else None
        if isinstance(rendered, Unsupported):
            return rendered
        if rendered is not None:
            plan = _as_rendered(plan, rendered)
        otherwise = self.parts.servings.why_not(plan, body, card)
        if otherwise is not None:
            return Unsupported("vllm_configured_otherwise", f"vLLM is configured otherwise than the latency lane: {otherwise}")
        tokens = await self._tokens(body, plan, card, credentials, rendered)
        if isinstance(tokens, Unsupported):
            return tokens
        stages.mark("decide")
        wanted = Wanted(plan, card, tokens, plan.max_tokens or 0, speculate=wish.speculate)
        reserved = await self.parts.slots.reserve(wish, wanted, stages, before_wait)
        if isinstance(reserved, Unsupported):
            return reserved
        try:
            return Prefill(
                body=prefill_body(body, plan, reserved.claim),
                original=body,
                plan=plan,
                card=card,
                stream=reserved.stream,
                node_id=reserved.node_id,
                wish=wish,
                stages=stages,
                credentials=credentials,
                rendered=rendered,
            )
        except BaseException:
            reserved.stream.cancel()
            raise

    def _plan(self, endpoint: Endpoint, body: Body) -> tuple[Plan, Card] | Unsupported:
        """Return the request's plan, by the card of the model's daemons."""
        settings = self.parts.settings
        tools, reasoning = settings.tools == "derender", settings.reasoning != "none"
        unsupported = why_not(endpoint, body, tools=tools, reasoning=reasoning)
        if unsupported is not None:
            return unsupported
        if endpoint is Endpoint.CHAT and settings.reasoning == "plain":
            return _REASONING
        view = self.parts.pools.get(body.get("model"))
        if view is None:
            return NO_SLOT[NoSlot.UNKNOWN_POOL]
        card = next((card for name in sorted(view.cards) if (card := self.parts.cards.get(name)) is not None), None)
        if card is None:
            return Unsupported("no_card", "the daemons' model card is not here yet")
        plan = make_plan(endpoint, body, card, tools=tools, reasoning=reasoning)
        if isinstance(plan, Unsupported):
            return plan
        return replace(plan, form=_as_served(plan.form, body, settings)), card

    async def _render(self, body: Body, credentials: Credentials) -> Rendered | Unsupported:
        upstream = self.parts.upstream
        return await render(upstream.post, body, credentials, upstream.tokenize_timeout_s)

    async def _tokens(
        self, body: Body, plan: Plan, card: Card, credentials: Credentials, rendered: Rendered | None
    ) -> int | Unsupported:
        """Return the tokens a slot must hold: prompt and answer, the context's at the most.

        vLLM is asked only where the bounds that the text puts on its tokens do not settle whether the prompt fits.
        """
        answer = plan.least_tokens
        longest, template = card.longest_token, self.parts.settings.template_tokens
        if rendered is not None:
            bounds = PromptBounds(len(rendered.prompt), len(rendered.prompt))
        else:
            bounds = prompt_bounds(plan.endpoint, body, longest_token=longest, template_tokens=template)
        if bounds.fewest + answer > card.context_tokens:
            return NO_SLOT[NoSlot.TOO_LARGE]
        most = bounds.most
        if most is None or most + answer > card.context_tokens:
            prompt = await self.parts.upstream.prompt_ids(tokenize_body(plan.endpoint, body), credentials)
            if prompt is None:
                return Unsupported("refused_by_vllm", "vLLM cannot tokenize this request")
            most = len(prompt)
            if most + answer > card.context_tokens:
                return NO_SLOT[NoSlot.TOO_LARGE]
        return card.context_tokens if plan.max_tokens is None else min(most + plan.max_tokens, card.context_tokens)


def _as_rendered(plan: Plan, rendered: Rendered) -> Plan:
    """Return a plan with what vLLM's parsers wish for."""
    sampling = replace(plan.sampling, stop_token_ids=rendered.stop_token_ids)
    form = replace(plan.form, skip_special_tokens=rendered.skip_special_tokens)
    return replace(plan, sampling=sampling, form=form, grammar=rendered.grammar)


def _as_served(form: Form, body: Body, settings: GatewaySettings) -> Form:
    """Return a form as this vLLM gives it, which has flags of its own."""
    if settings.force_include_usage:
        # In each chunk, too, whatever a request says of either (should_include_usage in vLLM's api_utils.py).
        form = replace(form, include_usage=form.stream, continuous_usage=form.stream)
    if "derender" in (settings.tools, settings.reasoning):
        form = replace(form, terse=True)
    if settings.return_tokens_as_token_ids and body.get("return_tokens_as_token_ids") is None:
        form = replace(form, tokens_as_ids=True)
    return form
