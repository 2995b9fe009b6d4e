"""A scripted parser in place of vLLM's, and answers whose message it makes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.answer import AnswerState, read_prefill_answer
from gateway.endpoints import Endpoint
from gateway.parsed import Parts
from gateway.plan import Form, Plan, Sampling
from gateway.reasoning import ReasoningTokens
from gateway.rendering import DERENDER_PATH, Derenderer, Parsing, ToolChoice
from gateway.tokens import Batch
from gateway.upstream import Credentials, UpstreamUnavailable
from tests.kit.gateway import CREDENTIALS, MODEL, PROMPT, bpe_tokenizer, card, end_id, ids_of, prefill_answer

END = end_id()
FIRST, *REST = ids_of("The river is the Seine, here and there.")
OPENING, CLOSING = ids_of("{}")
FUNCTION = {"name": "f", "arguments": "{}"}


def call(index: int, **over: Any) -> dict[str, Any]:
    return {"index": index, "id": f"id-of-{index}", "type": "function", "function": FUNCTION, **over}


@dataclass
class Parser:
    """vLLM's derender endpoint: a parser that leaves text as it is, unless a test has another one. `busy` holds it up."""

    delta: Callable[[list[int]], dict[str, Any]] = lambda ids: {"content": bpe_tokenizer().decode(ids)}
    message: dict[str, Any] = field(default_factory=dict)
    lost: int = 0  # so many calls get no answer
    status: int = 200
    asked: list[dict[str, Any]] = field(default_factory=list)
    busy: asyncio.Event | None = None
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    inside: int = 0

    async def post(self, path: str, content: bytes, credentials: Credentials, timeout_s: float) -> tuple[int, bytes]:
        assert (path, credentials, timeout_s) == (DERENDER_PATH, CREDENTIALS, 5)
        self.asked.append(json.loads(content))
        self.inside += 1
        assert self.inside == 1, "one call is in flight"
        self.entered.set()
        try:
            if self.busy is not None:
                await self.busy.wait()
            await asyncio.sleep(0)
        finally:
            self.inside -= 1
        if self.lost:
            self.lost -= 1
            raise UpstreamUnavailable("lost")
        return self.status, json.dumps(self._answer(self.asked[-1])).encode()

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if not asked["stream"]:
            return {"choices": [{"message": {"role": "assistant", "content": None, "reasoning": None, **self.message}}]}
        (choice,) = asked["generate_chunk"]["choices"]
        delta = {"role": None, "content": None, "reasoning": None, **self.delta(choice["token_ids"])}
        return {"chunk": {"choices": [{"delta": delta}]}, "stream_state": {"calls": len(self.asked)}}

    @property
    def pieces(self) -> list[tuple[list[int], str | None]]:
        """What went to the parser, call by call."""
        parts = [asked.get("generate_chunk") or asked["generate_response"] for asked in self.asked]
        return [(choice["token_ids"], choice["finish_reason"]) for part in parts for choice in part["choices"]]


def parts(
    parser: Parser,
    *,
    choice: ToolChoice = ToolChoice.AUTO,
    form: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    first: dict[str, Any] | None = None,
    reasoning: ReasoningTokens | None = None,
    **parsing: Any,
) -> Parts:
    """The parts of an answer; `first` is in the message that vLLM made of the first token."""
    plan = Plan(Endpoint.CHAT, MODEL, Sampling(0.0, **(sampling or {})), Form(**(form or {})), 40, parsed=True)
    told = prefill_answer(FIRST, prompt_token_ids=list(PROMPT), system_fingerprint="fp")
    told["choices"][0]["message"] |= first or {}
    values = {"one_call": False, "hidden": False, "unseen": frozenset(), "markers": frozenset(), **parsing}
    asks = Parsing(b'{"messages" : []}', MODEL, PROMPT, choice, **values)
    prefill = read_prefill_answer(Endpoint.CHAT, json.dumps(told).encode())
    return Parts(plan, prefill, AnswerState(card(), plan, ()), asks, Derenderer(parser.post, CREDENTIALS, 5, asks), reasoning)


async def of(*batches: Batch) -> AsyncIterator[Batch]:
    for batch in batches:
        yield batch


def stopped(ids: Sequence[int]) -> AsyncIterator[Batch]:
    """These tokens, and a stop id."""
    return of(Batch((FIRST,)), Batch((*ids, END), "stop"))
