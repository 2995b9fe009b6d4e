"""What the connector costs vLLM: prefill throughput with every request claimed, with none claimed, and without it; and memory.

Claimed prompts land in a process that has no engine, as on a decode node of its own: vLLM has its thread on one core, the
sender and what receives share what is left.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from benchmarks.handoff_landing import Landing, Plan, landing
from benchmarks.handoff_stack import LANE, PLAIN, Prompts, Stack
from benchmarks.handoff_wire import LAYOUT, expectation
from benchmarks.pace import together
from benchmarks.report import Measure
from handoff.identity import model_digest
from handoff.messages import ModelIdentity
from handoff.transports import TransportName

_LONG_TOKENS = 3_840  # thirty blocks of SmolLM2's
_ASKERS = 3  # at once, so that vLLM never waits for the next prompt
_PROMPTS_EACH = 1
_SHORT_TOKENS = 512
MEMORY_REQUESTS = 100

Prefill = Callable[[int, int], Awaitable[None]]
"""Have a prompt of so many tokens prefilled, as this asker (which has a slot of its own)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A few long prompts, one way."""

    per_second: float  # prompt tokens
    cpu_ms: float  # of vLLM's processes, for each 1,000 prompt tokens


@dataclass(frozen=True, slots=True)
class Round:
    """Each way once."""

    claimed: Turn
    unclaimed: Turn
    without: Turn


@dataclass(frozen=True, slots=True)
class Memory:
    """What vLLM's processes grew by in a hundred requests, in bytes."""

    claimed: int
    unclaimed: int


async def measure(stack: Stack, transport: TransportName, *, rounds: int) -> list[Measure]:
    """Take the measures; raises ProcessError, with what to look at, when a prompt is not served or does not land."""
    settings = stack.settings
    model = ModelIdentity(settings.served_model_name, model_digest(settings.model), settings.context_tokens)
    expected = expectation(settings.context_tokens, model)
    [secret, *_] = settings.signing_keys
    plan = Plan(transport, secret, expected, _ASKERS, LAYOUT.bytes_for(settings.context_tokens))
    async with landing(plan) as far:
        ways = _Ways(stack, far)
        await _round(ways, 0)  # the first prompts of a vLLM pay for its memory
        taken = [await _round(ways, number) for number in range(rounds)]
        await _requests(ways.claimed, MEMORY_REQUESTS // 4)
        memory = Memory(claimed=await _growth(stack, ways.claimed), unclaimed=await _growth(stack, ways.unclaimed))
    return told(taken, memory)


def told(rounds: Sequence[Round], memory: Memory) -> list[Measure]:
    """Return what the rounds say."""

    def rate(name: str, how: str) -> Measure:
        turns: list[Turn] = [getattr(taken, name) for taken in rounds]
        cpu_ms = statistics.median(turn.cpu_ms for turn in turns)
        how = f"{how}; {cpu_ms:.0f} ms of processor time for 1,000 tokens"
        return Measure(f"prefill_{name}_per_second", statistics.median(turn.per_second for turn in turns), "/s", how)

    def share(name: str, how: str) -> Measure:
        turns: list[tuple[Turn, Turn]] = [(getattr(taken, name), taken.without) for taken in rounds]
        cpu = statistics.median(100 * turn.cpu_ms / without.cpu_ms for turn, without in turns)
        value = statistics.median(100 * turn.per_second / without.per_second for turn, without in turns)
        return Measure(f"prefill_{name}_of_without", value, "%", f"{how}; {cpu:.1f} % of the processor time")

    grown = (
        f"in {MEMORY_REQUESTS} requests of {_SHORT_TOKENS} tokens; with as many unclaimed ones {memory.unclaimed / 1e6:.2f} MB"
    )
    return [
        rate("without", f"prompt tokens, {_ASKERS} prompts of {_LONG_TOKENS} at once, no connector"),
        rate("unclaimed", "a connector, and no claims"),
        rate("claimed", "every prompt handed over"),
        share("claimed", "of the throughput without a connector, in the same round"),
        share("unclaimed", "the same"),
        Measure("memory_growth_mb", memory.claimed / 1e6, "MB", grown),
    ]


class _Ways:
    """The three ways to have a prompt prefilled."""

    def __init__(self, stack: Stack, far: Landing) -> None:
        self.stack = stack
        self._far = far
        self._prompts = Prompts(seed=3)

    async def without(self, asker: int, tokens: int) -> None:
        """By the vLLM that has no connector."""
        await self.stack.prefill(self._prompts.next(tokens), to=PLAIN)

    async def unclaimed(self, asker: int, tokens: int) -> None:
        """By the one that has it, for nobody."""
        await self.stack.prefill(self._prompts.next(tokens), to=LANE)

    async def claimed(self, asker: int, tokens: int) -> None:
        """By the one that has it, and handed over."""
        claim = await self._far.reserve(asker)
        await self.stack.prefill(self._prompts.next(tokens), to=LANE, claim=claim)
        await self._far.landed(asker)


async def _round(ways: _Ways, number: int) -> Round:
    order = [("claimed", ways.claimed, LANE), ("without", ways.without, PLAIN), ("unclaimed", ways.unclaimed, LANE)]
    first = number % len(order)  # what one way leaves behind is not always the same one's to bear
    turns = {name: await _turn(ways.stack, prefill, by) for name, prefill, by in order[first:] + order[:first]}
    return Round(**turns)


async def _turn(stack: Stack, prefill: Prefill, by: str) -> Turn:
    async def ask(asker: int) -> None:
        for _ in range(_PROMPTS_EACH):
            await prefill(asker, _LONG_TOKENS)

    spent, began = stack.prefill_cpu(by), time.monotonic()
    await together(ask(asker) for asker in range(_ASKERS))
    seconds, spent = time.monotonic() - began, stack.prefill_cpu(by) - spent
    tokens = _ASKERS * _PROMPTS_EACH * _LONG_TOKENS
    return Turn(tokens / seconds, 1e6 * spent / tokens)


async def _growth(stack: Stack, prefill: Prefill) -> int:
    before = await asyncio.to_thread(stack.prefill_memory)
    await _requests(prefill, MEMORY_REQUESTS)
    return await asyncio.to_thread(stack.prefill_memory) - before


async def _requests(prefill: Prefill, count: int) -> None:
    for _ in range(count):
        await prefill(0, _SHORT_TOKENS)
