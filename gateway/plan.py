"""One request's plan: the explicit values both legs get, how the answer looks, and the prefill leg's body."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.bad_words import bad_word_ids
from gateway.body import Body
from gateway.cards import Card, Defaults
from gateway.eligibility import Unsupported, calls_tools, unsupported
from gateway.endpoints import Endpoint
from gateway.fields import FIELDS, Leg
from gateway.grammars import Grammar, grammar_of, is_constraint
from gateway.prompts import prompt_ids
from handoff.claim import SignedClaim, to_params

__all__ = ["Form", "Grammar", "Plan", "Sampling", "explicit", "make_plan", "prefill_body", "stop_ids"]

_MIN_TEMPERATURE = 0.01  # vLLM raises lower positive temperatures to this (SamplingParams, _MAX_TEMP)
_MOST_BIAS = 100.0
_COMPLETION_TOKENS = 16  # where a completion names no max_tokens: OpenAI's default, and vLLM's


@dataclass(frozen=True, slots=True)
class Sampling:
    """What chooses tokens, on both legs. Meanings and ranges are vLLM's (SamplingParams); defaults are its neutral values."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps every token
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # clamped to -100..100, as vLLM does
    allowed_token_ids: tuple[int, ...] = ()  # none: every id
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # the same, tokenized as vLLM does
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()  # the client's own
    logprobs: int | None = None  # alternatives for each token; None: no logprobs


@dataclass(frozen=True, slots=True)
class Form:
    """What the answer looks like, apart from its tokens."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # in every chunk; only with include_usage
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # in logprobs: "token_id:7" instead of the token's text
    terse: bool = False  # as a vLLM with a parser streams a chat: no chunk, and no content, for tokens without text


@dataclass(frozen=True, slots=True)
class Plan:
    """A request the lane serves."""

    endpoint: Endpoint
    model: str
    sampling: Sampling
    form: Form
    max_tokens: int | None  # None: the rest of the context
    grammar: Grammar | None = None
    cache_salt: str | None = None
    parsed: bool = False  # vLLM's own parsers make the answer's message out of its tokens (tool calls, reasoning)
    priority: int = 0  # in vLLM's scheduler

    @property
    def least_tokens(self) -> int:
        """Tokens of the answer that must fit into the context behind the prompt: vLLM refuses a request where they do not.

        More of them need not: vLLM cuts the limit down to the rest of the context (get_max_tokens in its api_utils.py). One
        that is asked for and above the whole context it refuses, however, and so does `make_plan`.
        """
        return max(1, self.sampling.min_tokens)


def make_plan(
    endpoint: Endpoint, body: Body, card: Card, *, tools: bool = False, reasoning: bool = False
) -> Plan | Unsupported:
    """Resolve what the client left open with the model's own defaults, once, for both legs.

    Expects a body that `why_not` has nothing against, with the same `tools` and `reasoning`.
    """
    if not card.vocab_size:
        return Unsupported("no_card", "the daemons' model card does not tell the size of the vocabulary: they are too old")
    beyond = _beyond_context(endpoint, body, card.context_tokens)
    if beyond is not None:
        return unsupported(beyond, f"{beyond} is {body.get(beyond)}, and the whole context has {card.context_tokens} tokens")
    outside = _outside_vocabulary(endpoint, body, card.vocab_size)
    if outside is not None:
        return unsupported(outside, f"{outside} has token ids that the model does not have; it has {card.vocab_size}")
    try:
        bad_words = bad_word_ids(body.get("bad_words") or (), card.tokenizer)
    except ValueError as error:
        return unsupported("bad_words", str(error))
    try:
        grammar = grammar_of(body.get("response_format"), body.get("structured_outputs"))
    except ValueError as error:
        key = "response_format" if is_constraint(body.get("response_format")) else "structured_outputs"
        return unsupported(key, str(error))
    max_tokens = _max_tokens(endpoint, body, card.defaults)
    if max_tokens is not None and max(1, body.get("min_tokens") or 0) > max_tokens:
        return unsupported("min_tokens", f"at most {max_tokens} tokens are asked for, and more at least")
    return Plan(
        endpoint=endpoint,
        model=body.get("model"),
        sampling=_sampling(endpoint, body, card.defaults, bad_words),
        form=_form(body),
        max_tokens=max_tokens,
        grammar=grammar,
        cache_salt=body.get("cache_salt"),
        parsed=endpoint is Endpoint.CHAT and (reasoning or (tools and calls_tools(body))),
        priority=body.get("priority") or 0,
    )


def prefill_body(body: Body, plan: Plan, claim: SignedClaim) -> bytes:
    """Return the prefill leg's body: the prompt as it came, one token, explicit sampling, and the claim.

    The only place where a request becomes a prefill. Stop strings stay behind: the gateway matches them over the whole answer.
    """
    sampling = plan.sampling
    extra: dict[str, Any] = {
        **explicit(sampling),
        "min_tokens": min(1, sampling.min_tokens),
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": to_params(claim),
    }
    if sampling.seed is not None:
        extra["seed"] = sampling.seed
    if sampling.logprobs is not None:
        chat = plan.endpoint is Endpoint.CHAT
        extra |= {"logprobs": True, "top_logprobs": sampling.logprobs} if chat else {"logprobs": sampling.logprobs}
        extra["return_tokens_as_token_ids"] = True  # a token's text does not always say which token it is
    return body.with_members(_KEPT[plan.endpoint], extra)


def explicit(sampling: Sampling) -> dict[str, Any]:
    """Return, as request fields, what every leg is told even where it is neutral: vLLM has defaults of its own."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
    }


def stop_ids(sampling: Sampling, card: Card) -> frozenset[int]:
    """Return the ids that end an answer."""
    own = () if sampling.ignore_eos else card.stop_token_ids
    return frozenset([*own, *sampling.stop_token_ids])


def _kept(endpoint: Endpoint) -> tuple[str, ...]:
    """Return the fields whose bytes reach the prefill leg as they came."""
    said_anew = {*explicit(Sampling(temperature=1.0)), "min_tokens", "seed", "logprobs", "top_logprobs"}
    rows = FIELDS[endpoint].items()
    return tuple(key for key, row in rows if row.leg in (Leg.PREFILL, Leg.BOTH) and key not in said_anew)


_KEPT = {endpoint: _kept(endpoint) for endpoint in Endpoint}


def _sampling(endpoint: Endpoint, body: Body, defaults: Defaults, bad_words: tuple[tuple[int, ...], ...]) -> Sampling:
    temperature = _temperature(_first(body.get("temperature"), defaults.temperature, 1.0))
    # vLLM's greedy sampling looks at no other of these; the model's defaults are often not greedy's own.
    greedy = temperature == 0
    seed = body.get("seed")
    return Sampling(
        temperature=temperature,
        top_p=1.0 if greedy else float(_first(body.get("top_p"), defaults.top_p, 1.0)),
        top_k=0 if greedy else max(0, int(_first(body.get("top_k"), defaults.top_k, 0))),
        min_p=0.0 if greedy else float(_first(body.get("min_p"), defaults.min_p, 0.0)),
        seed=None if seed == -1 else seed,
        presence_penalty=float(_first(body.get("presence_penalty"), defaults.presence_penalty, 0.0)),
        frequency_penalty=float(_first(body.get("frequency_penalty"), defaults.frequency_penalty, 0.0)),
        repetition_penalty=float(_first(body.get("repetition_penalty"), defaults.repetition_penalty, 1.0)),
        logit_bias={int(key): _bias(value) for key, value in (body.get("logit_bias") or {}).items()},
        allowed_token_ids=tuple(dict.fromkeys(body.get("allowed_token_ids") or ())),
        bad_words=tuple(dict.fromkeys(body.get("bad_words") or ())),
        bad_word_ids=bad_words,
        min_tokens=body.get("min_tokens") or 0,
        ignore_eos=bool(body.get("ignore_eos")),
        stop_token_ids=tuple(dict.fromkeys(body.get("stop_token_ids") or ())),
        logprobs=_logprobs(endpoint, body),
    )


def _form(body: Body) -> Form:
    stop, options = body.get("stop"), body.get("stream_options") or {}
    include_usage = bool(options.get("include_usage"))
    return Form(
        stream=bool(body.get("stream")),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        include_stop=bool(body.get("include_stop_str_in_output")),
        skip_special_tokens=body.get("skip_special_tokens") is not False,
        spaces_between_special_tokens=body.get("spaces_between_special_tokens") is not False,
        return_token_ids=bool(body.get("return_token_ids")),
        tokens_as_ids=bool(body.get("return_tokens_as_token_ids")),
    )


def _outside_vocabulary(endpoint: Endpoint, body: Body, vocab_size: int) -> str | None:
    """Return the field that names a token id which the model does not have."""
    ids: dict[str, Iterable[int]] = {
        "stop_token_ids": body.get("stop_token_ids") or (),
        "allowed_token_ids": body.get("allowed_token_ids") or (),
        "logit_bias": map(int, body.get("logit_bias") or ()),
    }
    if endpoint is Endpoint.COMPLETIONS:
        ids["prompt"] = prompt_ids(body) or ()
    return next((key for key, listed in ids.items() if max(listed, default=0) >= vocab_size), None)


def _beyond_context(endpoint: Endpoint, body: Body, context_tokens: int) -> str | None:
    """Return the field that asks for a longer answer than the context holds, prompt or not (vLLM: renderers/params.py)."""
    chat = endpoint is Endpoint.CHAT
    key = "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
    return key if (body.get(key) or 0) > context_tokens else None


def _max_tokens(endpoint: Endpoint, body: Body, defaults: Defaults) -> int | None:
    if endpoint is Endpoint.COMPLETIONS:
        return int(_first(body.get("max_tokens"), _COMPLETION_TOKENS))
    asked = (body.get("max_completion_tokens"), body.get("max_tokens"), defaults.max_tokens)
    return next((tokens for tokens in asked if tokens is not None), None)


def _logprobs(endpoint: Endpoint, body: Body) -> int | None:
    logprobs: bool | int | None = body.get("logprobs")
    if endpoint is Endpoint.COMPLETIONS or logprobs is None:
        return logprobs
    return (body.get("top_logprobs") or 0) if logprobs else None


def _temperature(value: float) -> float:
    return max(float(value), _MIN_TEMPERATURE) if value > 0 else 0.0


def _bias(value: float) -> float:
    return min(_MOST_BIAS, max(-_MOST_BIAS, float(value)))


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
