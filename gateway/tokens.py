"""Tokens of an answer on their way to the client, whoever decoded them: prefill, a daemon, or vLLM going on for one."""

from dataclasses import dataclass
from typing import Annotated

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What vLLM would report for one token: natural logarithms, not yet clamped."""

    logprob: float  # of the token itself
    top: tuple[tuple[int, float], ...] = ()  # the most probable ids with theirs, in order; may hold the token itself


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens in order; `finish` ("stop" or "length") with the last one only.

    On "stop" the last id is the stop id. `logprobs` has one entry for each id where the request asks for them.
    """

    ids: tuple[int, ...]
    finish: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
