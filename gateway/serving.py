"""How vLLM is configured, as its connector tells with each prefill, and whether the lane's answer would be vLLM's own.

A daemon reads the model's files; vLLM may have been told otherwise. Where that changes an answer, vLLM gives it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import structlog

from gateway.body import Body
from gateway.cards import Card, Defaults
from gateway.endpoints import Endpoint
from gateway.plan import Plan
from gateway.reasoning import reasoning_tokens
from gateway.settings import GatewaySettings
from gateway.tokens import TokenId
from handoff.claim import CLAIM_KEY

log = structlog.get_logger(__name__)

_REMEMBERED_S = 60.0  # vLLM may be restarted with another configuration
_NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What vLLM takes where neither a request nor a model says anything."""

_NOT_OF_GREEDY = frozenset({"top_p", "top_k", "min_p"})

_Limit = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class Serving:
    """One vLLM's configuration, where it shapes an answer (connector/serving.py makes it)."""

    defaults: Mapping[str, float | None]  # of sampling, by request field
    longest_answer: _Limit | None  # tokens, whatever a request asks for
    logprobs_mode: str
    grammar_backend: str
    compact_json: bool  # grammars for JSON allow no whitespace
    reasoning_parser: str  # empty: none
    grammar_in_reasoning: bool
    watermark: bool


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What vLLM's connector tells with the answer to a prefill leg whose claim it took."""

    first_token: TokenId
    prompt_tail: list[TokenId]  # the prompt's last ids
    prompt_digest: str  # of all of them (handoff/prompt.py)
    serving: Serving


def read_handed_over(answer: Any) -> HandedOver:
    """Read it out of vLLM's parsed answer; raises ValueError where the connector did not take the claim."""
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    if not isinstance(params, dict) or CLAIM_KEY not in params:
        raise ValueError("vLLM's connector did not take the claim: do both sides share ANCHORLEG_SECRET?")
    try:
        return msgspec.convert(params[CLAIM_KEY], HandedOver)
    except msgspec.ValidationError as error:
        raise ValueError(f"vLLM's connector is of another version than this gateway: {error}") from error


def why_not_exact(serving: Serving, plan: Plan, body: Body, card: Card, settings: GatewaySettings) -> str | None:
    """Say what of vLLM's configuration makes its answer another one than the lane's; None if nothing does."""
    return (
        _other_defaults(serving, plan, body, card.defaults)
        or _other_output(serving, plan, card, settings)
        or (None if plan.grammar is None else _other_grammar(serving, plan))
    )


def _other_defaults(serving: Serving, plan: Plan, body: Body, defaults: Defaults) -> str | None:
    for name, neutral in _NEUTRAL.items():
        if plan.sampling.temperature == 0 and name in _NOT_OF_GREEDY:
            continue
        if body.get(name) is None and _default(serving.defaults.get(name), neutral) != _default(
            getattr(defaults, name), neutral
        ):
            return (
                f"its default {name} is {serving.defaults.get(name)}, the model's own {getattr(defaults, name)}: "
                "run vLLM with --generation-config auto and without --override-generation-config"
            )
    limit = serving.defaults.get("max_tokens")
    # A completion has a default of its own.
    if plan.endpoint is Endpoint.CHAT and plan.max_tokens == defaults.max_tokens and limit != defaults.max_tokens:
        return (
            f"its default max_tokens is {limit}, the model's own {defaults.max_tokens}: run vLLM with --generation-config auto"
        )
    most = serving.longest_answer
    if most is not None and (plan.max_tokens is None or plan.max_tokens > most):
        return f"it ends every answer after {most} tokens: run vLLM without max_new_tokens in --override-generation-config"
    return None


def _default(value: float | None, neutral: float) -> float:
    # vLLM takes -1, too, for "every token" (top_k).
    return neutral if value is None or (value == -1 and neutral == 0) else value


def _other_output(serving: Serving, plan: Plan, card: Card, settings: GatewaySettings) -> str | None:
    if serving.watermark:
        return "it watermarks its answers: run vLLM without --watermark-config, or without the latency lane"
    if plan.sampling.logprobs is not None and serving.logprobs_mode != "raw_logprobs":
        return f"its logprobs are {serving.logprobs_mode}: run vLLM with --logprobs-mode raw_logprobs"
    parser = serving.reasoning_parser
    if parser and plan.endpoint is Endpoint.CHAT and settings.reasoning == "none":
        return f"it has the reasoning parser {parser}: tell the gateway with --reasoning derender, or --reasoning plain"
    told = not plan.form.stream or plan.form.include_usage
    if parser and plan.parsed and told and reasoning_tokens(parser, card.tokenizer) is None:
        return f"only it can count the tokens of reasoning that {parser} finds: run the gateway with --reasoning plain"
    return None


def _other_grammar(serving: Serving, plan: Plan) -> str | None:
    if serving.grammar_backend != "auto" and not serving.grammar_backend.startswith("xgrammar"):
        return (
            f"its grammars are made by {serving.grammar_backend}: run vLLM with the structured outputs backend auto or xgrammar"
        )
    if serving.compact_json:
        return "its JSON has no whitespace: run vLLM without disable_any_whitespace"
    # Of an answer that vLLM's parsers make, vLLM has said that the grammar begins with it (gateway/rendering.py).
    if serving.reasoning_parser and not serving.grammar_in_reasoning and not plan.parsed:
        return "its grammars begin after the reasoning: the lane's begin with the answer"
    return None


class Servings:
    """What is known of the vLLM of each model, for as long as it may still be so."""

    def __init__(self, settings: GatewaySettings, now: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._now = now
        self._seen: dict[str, tuple[Serving, float]] = {}  # by model, with the time
        self._told: set[tuple[str, str]] = set()

    def why_not(self, plan: Plan, body: Body, card: Card) -> str | None:
        """Say why vLLM's answer is likely to be another one, by what its connector said last; None where nothing is known."""
        serving, seen = self._seen.get(plan.model, (None, 0.0))
        if serving is None or self._now() - seen >= _REMEMBERED_S:
            return None
        return why_not_exact(serving, plan, body, card, self._settings)

    def judge(self, serving: Serving, plan: Plan, body: Body, card: Card) -> str | None:
        """Say why the answer of the vLLM that said this is another one, once in the log, too; remembers what it said."""
        self._seen[plan.model] = serving, self._now()
        reason = why_not_exact(serving, plan, body, card, self._settings)
        if reason is not None and (plan.model, reason) not in self._told:
            self._told.add((plan.model, reason))
            log.error(
                "vLLM is configured otherwise than the lane; it serves such requests itself", model=plan.model, why=reason
            )
        return reason
