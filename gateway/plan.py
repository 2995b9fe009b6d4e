"""One request's plan: the explicit values both legs get, how the answer looks, and the prefill leg's body."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.body import Body
from gateway.cards import Card
from gateway.eligibility import Unsupported, prefill_fields
from gateway.endpoints import Endpoint
from handoff.claim import SignedClaim, to_params

_MIN_TEMPERATURE = 0.01  # vLLM raises lower positive temperatures to this (SamplingParams, _MAX_TEMP)


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


class GrammarKind(StrEnum):
    """The forms of constraint vLLM takes; values are the wire's names (handoff/decode.proto)."""

    JSON_SCHEMA = "JSON_SCHEMA"
    JSON_OBJECT = "JSON_OBJECT"
    REGEX = "REGEX"
    CHOICE = "CHOICE"
    EBNF = "EBNF"
    STRUCTURAL_TAG = "STRUCTURAL_TAG"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the answer's text must match."""

    kind: GrammarKind
    source: str = ""  # JSON for a schema, a list of choices, or a structural tag


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


def make_plan(body: Body, card: Card) -> Plan | Unsupported:
    """Resolve what the client left open with the model's own defaults, once, for both legs.

    Expects a body that `why_not` has nothing against.
    """
    defaults = card.defaults
    if (
        defaults.min_p
        or defaults.presence_penalty
        or defaults.frequency_penalty
        or defaults.repetition_penalty not in (None, 1.0)
    ):
        return Unsupported("model_defaults", "the model's generation defaults ask for what the latency lane does not serve")
    stop = body.get("stop")
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or defaults.max_tokens
    return Plan(
        endpoint=Endpoint.CHAT,
        model=body.get("model"),
        sampling=Sampling(
            temperature=_temperature(_first(body.get("temperature"), defaults.temperature, 1.0)),
            top_p=float(_first(body.get("top_p"), defaults.top_p, 1.0)),
            top_k=max(0, int(_first(body.get("top_k"), defaults.top_k, 0))),
            seed=None if body.get("seed") == -1 else body.get("seed"),
            ignore_eos=bool(body.get("ignore_eos")),
        ),
        max_tokens=max_tokens,
        form=Form(
            stream=bool(body.get("stream")),
            include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        ),
        cache_salt=body.get("cache_salt"),
    )


def prefill_body(body: Body, plan: Plan, claim: SignedClaim) -> bytes:
    """Return the prefill leg's body: the prompt as it came, one token, explicit sampling, and the claim.

    The only place where a request becomes a prefill. Stop strings stay behind: the gateway matches them over the whole answer.
    """
    sampling = plan.sampling
    extra = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "ignore_eos": sampling.ignore_eos,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": to_params(claim),
    }
    if sampling.seed is not None:
        extra["seed"] = sampling.seed
    return body.with_members(prefill_fields(), extra)


def _temperature(value: float) -> float:
    return max(float(value), _MIN_TEMPERATURE) if value > 0 else 0.0


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
