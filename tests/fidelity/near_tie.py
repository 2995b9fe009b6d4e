"""Tells whether two greedy answers part at a near tie: two tokens that float32 cannot tell apart.

Prefill and decode add the same numbers in another order. Where the two most probable tokens are closer than that, neither
answer is wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

CLOSE = 1e-3


@dataclass(frozen=True, slots=True)
class NearTie:
    """The position (0 is the answer's first token) where two answers part, and what plain vLLM thought of both tokens."""

    position: int
    plain: int
    lane: int
    logprobs: tuple[float, float]


def parting(plain: Any, lane: Any) -> NearTie | None:
    """Return the near tie at which two answers part.

    Expects answers with `token_ids` and with logprobs whose tokens are "token_id:7". None if they do not part, or part for
    another reason, or do not tell their tokens: those of hidden reasoning are hidden, too.
    """
    one, other = plain["choices"][0], lane["choices"][0]
    pairs = zip(count(), one["token_ids"] or (), other["token_ids"] or (), strict=False)
    position, mine, yours = next((pair for pair in pairs if pair[1] != pair[2]), (-1, -1, -1))
    if position < 0:
        return None
    known = _alternatives(one["logprobs"], position)
    logprobs = known.get(f"token_id:{mine}"), known.get(f"token_id:{yours}")
    if logprobs[0] is None or logprobs[1] is None or abs(logprobs[0] - logprobs[1]) > CLOSE:
        return None
    return NearTie(position, mine, yours, (logprobs[0], logprobs[1]))


def _alternatives(logprobs: Mapping[str, Any], position: int) -> dict[str, float]:
    if "content" in logprobs:
        entry = logprobs["content"][position]
        return {a["token"]: a["logprob"] for a in [*entry["top_logprobs"], entry]}
    return {**logprobs["top_logprobs"][position], logprobs["tokens"][position]: logprobs["token_logprobs"][position]}
