"""What the daemon asks of a decode engine.

An engine owns one sequence at a time: a static KV cache, the weights, and a loop that turns one token into the next.
It knows nothing about text, sockets, slots or leases. Another runtime can take its place by satisfying `Engine`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch


class EngineError(Exception):
    """The engine cannot do what was asked: the message names the value and the way out."""


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

    Semantics are vLLM's: temperature 0 is greedy; top_k 0 keeps every token; top_p 1.0 keeps every token; top-k is applied
    before top-p. `seed` None draws a fresh one. The same seed gives the same tokens for the same prompt on the same engine.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeParams:
    """One request for `Engine.decode`."""

    sampling: SamplingParams
    max_tokens: int  # output tokens in all, the first one included; at least 1
    stop_token_ids: frozenset[int]  # a sampled id in this set ends the answer (it is emitted)


@dataclass(frozen=True, slots=True)
class Step:
    """What one engine step produced: one or more ids, in order; `finish` on the last step only."""

    ids: tuple[int, ...]
    finish: FinishReason | None = None


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
