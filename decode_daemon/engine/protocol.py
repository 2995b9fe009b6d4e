"""What the daemon asks of a decode engine.

An engine owns one sequence at a time: a static KV cache, the weights, and a loop that turns one token into the next.
It knows nothing about text, sockets, slots or leases. Another runtime can take its place by satisfying `Engine`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch


class EngineError(Exception):
    """The engine cannot do what was asked: the message names the value and the way out."""


class EngineLostError(EngineError):
    """The engine can do nothing any more: its process has to start anew."""


class FinishReason(StrEnum):
    """Why decoding ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """The shape of the model an engine has loaded."""

    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int  # most positions (prompt + output) the KV cache holds
    dtype: torch.dtype  # of weights and KV cache


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; every value explicit, the model's defaults already resolved.

    Semantics and order are vLLM's (v1/sample/sampler.py): allowed ids, bad words, min_tokens, logit bias, penalties,
    temperature, min_p, top-k, top-p. Temperature 0 is greedy; top_k 0 keeps every token; top_p 1.0 keeps every token. `seed`
    None draws a fresh one. The same seed gives the same tokens for the same prompt on the same engine.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0  # of ids in the answer
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # of ids in prompt or answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()  # none: every id
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last id of a sequence is withheld where the answer ends with the others
    min_tokens: int = 0  # of the whole answer, before an id of `ending_token_ids` may be chosen
    ending_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None  # alternatives to report for each token; None reports nothing


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities, before penalties and temperature, under a constraint's mask."""

    logprob: float  # of the chosen id
    top_ids: tuple[int, ...]  # the most probable ids, most probable first
    top_logprobs: tuple[float, ...]


class Constraint(Protocol):
    """What an answer's tokens must match: a grammar's state, advanced by every token. Not thread-safe."""

    def mask(self) -> torch.Tensor | None:
        """Return which ids may come next, bool [vocab]; None when every id may."""
        ...

    def accept(self, token: int) -> None:
        """Advance; raises EngineError for a token that may not come here."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeParams:
    """One request for `Engine.decode`."""

    sampling: SamplingParams
    max_tokens: int  # output tokens from the first one on, itself included; at least 1
    stop_token_ids: frozenset[int]  # a sampled id in this set ends the answer (it is emitted)
    constraint: Constraint | None = None  # at the answer's beginning: the engine feeds it what was answered before
    answered: int = 0  # so many of the prompt's last ids are the answer's own
    speculate: bool = True  # False: one token a step, also where the engine could verify drafts


@dataclass(frozen=True, slots=True)
class Step:
    """What one engine step produced: one or more ids, in order; `finish` on the last step only.

    `accepted` of the `drafted` ids it verified are among its ids.
    """

    ids: tuple[int, ...]
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each id, when the request asks for them
    drafted: int = 0
    accepted: int = 0


class Engine(Protocol):
    """One sequence at a time. Not thread-safe: `kv_target` (and filling it) and `decode` happen in one thread."""

    def describe(self) -> EngineDescription:
        """Return the loaded model's shape."""
        ...

    def kv_target(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the cache to fill before `decode`.

        Shapes: K and V, each [layers, kv_heads, tokens, head_dim] in the engine's dtype; K is rotated (RoPE applied), as vLLM
        stores it. Position i of the views is position i of the sequence.

        Raises EngineError if `tokens` exceeds the context.
        """
        ...

    def decode(
        self,
        prompt_ids: Sequence[int],
        first_token: int,
        params: DecodeParams,
        cancelled: Callable[[], bool],
    ) -> Iterator[Step]:
        """Continue after `first_token`, whose own KV is not in the cache yet; positions 0..len(prompt_ids)-1 are.

        Yields a Step per engine step as soon as its ids are known, until a stop id, `max_tokens`, the context's end, or
        `cancelled()` returns True (then the iterator ends without a finish). The first token is never emitted again. With
        max_tokens 1 nothing is yielded but a final Step((), LENGTH).

        Raises EngineError for a first token or prompt outside the model's vocabulary or context.
        """
        ...
