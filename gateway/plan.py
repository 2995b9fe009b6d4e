"""One request's plan: the explicit values both legs get, and the prefill leg's body."""

from dataclasses import dataclass

from gateway.body import Body
from gateway.cards import Card
from gateway.eligibility import Unsupported, prefill_fields
from handoff.claim import SignedClaim, to_params

_MIN_TEMPERATURE = 0.01  # vLLM raises lower positive temperatures to this (SamplingParams, _MAX_TEMP)


@dataclass(frozen=True, slots=True)
class Sampling:
    """What chooses tokens, on both legs."""

    temperature: float
    top_p: float
    top_k: int  # 0 keeps every token
    seed: int | None
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A request the lane serves."""

    model: str
    sampling: Sampling
    max_tokens: int | None  # None: the rest of the context
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    cache_salt: str | None


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
        model=body.get("model"),
        sampling=Sampling(
            temperature=_temperature(_first(body.get("temperature"), defaults.temperature, 1.0)),
            top_p=float(_first(body.get("top_p"), defaults.top_p, 1.0)),
            top_k=max(0, int(_first(body.get("top_k"), defaults.top_k, 0))),
            seed=None if body.get("seed") == -1 else body.get("seed"),
            ignore_eos=bool(body.get("ignore_eos")),
        ),
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
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
