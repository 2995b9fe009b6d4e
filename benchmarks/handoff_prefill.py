"""What the connector costs vLLM: prefill throughput with every request claimed, with none claimed, and without it; and memory.

Claimed prompts land in a process that has no engine, as on a decode node of its own: vLLM has its thread on one core, the
sender and what receives share what is left.

The same prompt takes the same vLLM a fifth longer at one time than at another where the machine is shared with others. So turns
are short and many, the three ways follow one another closely, and each way is judged by its quicker turns: what disturbs a turn
only ever makes it slower.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.handoff_landing import Landing, Plan, landing
from benchmarks.handoff_stack import LANE, PLAIN, Prompts, Stack
from benchmarks.handoff_wire import LAYOUT, expectation
from benchmarks.pace import together
from benchmarks.report import Measure
from handoff.identity import model_digest
from handoff.messages import ModelIdentity
from handoff.transports import TransportName

_LONG_TOKENS = 1_920  # fifteen blocks of SmolLM2's
_ASKERS = 2  # at once, so that vLLM never waits for the next prompt
_TURN_TOKENS = _ASKERS * _LONG_TOKENS
_RESAMPLES = 1_000
_SHORT_TOKENS = 512
MEMORY_REQUESTS = 100

Prefill = Callable[[int, int], Coroutine[Any, Any, None]]
"""Have a prompt of so many tokens prefilled, as this asker (which has a slot of its own)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A few long prompts, one way."""

    seconds: float
    cpu_s: float  # processor time of vLLM's processes


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
    """Return what the rounds say; a share comes with the interval that 95 of 100 resampled sets of rounds fall into."""

    def rate(name: str, how: str) -> Measure:
        cpu_ms = 1e6 * quicker([turn.cpu_s for turn in turns(name)]) / _TURN_TOKENS
        how = f"{how}; {cpu_ms:.0f} ms of processor time for 1,000 tokens"
        return Measure(f"prefill_{name}_per_second", _TURN_TOKENS / quicker([turn.seconds for turn in turns(name)]), "/s", how)

    def share(name: str, how: str) -> Measure:
        pairs = list(zip(turns("without"), turns(name), strict=True))
        low, high = _interval(pairs)
        cpu = 100 * quicker([turn.cpu_s for _, turn in pairs]) / quicker([turn.cpu_s for turn, _ in pairs])
        how = f"{how}; 95 %: {low:.1f} to {high:.1f}; {cpu:.1f} % of the processor time"
        return Measure(f"prefill_{name}_of_without", _share(pairs), "%", how)

    def turns(name: str) -> list[Turn]:
        return [getattr(taken, name) for taken in rounds]

    grown = (
        f"in {MEMORY_REQUESTS} requests of {_SHORT_TOKENS} tokens; with as many unclaimed ones {memory.unclaimed / 1e6:.2f} MB"
    )
    return [
        rate("without", f"prompt tokens, {_ASKERS} prompts of {_LONG_TOKENS} at once, {len(rounds)} times, no connector"),
        rate("unclaimed", "a connector, and no claims"),
        rate("claimed", "every prompt handed over"),
        share("claimed", "of the throughput without a connector, in turns"),
        share("unclaimed", "the same"),
        Measure("memory_growth_mb", memory.claimed / 1e6, "MB", grown),
    ]


def quicker(values: Sequence[float]) -> float:
    """Return the first quartile: three turns of four were slower."""
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=4, method="inclusive")[0]


def _share(pairs: Sequence[tuple[Turn, Turn]]) -> float:
    """Return the second ones' throughput in percent of the first ones'."""
    return 100 * quicker([one.seconds for one, _ in pairs]) / quicker([other.seconds for _, other in pairs])


def _interval(pairs: Sequence[tuple[Turn, Turn]]) -> tuple[float, float]:
    """Return between which shares 95 of 100 lie, had other rounds of the same kind been taken (bootstrap of percentiles)."""
    chance = random.Random(1)
    shares = sorted(_share(chance.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    return shares[_RESAMPLES // 40], shares[-_RESAMPLES // 40 - 1]


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
    spent, began = stack.prefill_cpu(by), time.monotonic()
    await together(prefill(asker, _LONG_TOKENS) for asker in range(_ASKERS))
    return Turn(time.monotonic() - began, stack.prefill_cpu(by) - spent)


async def _growth(stack: Stack, prefill: Prefill) -> int:
    before = await asyncio.to_thread(stack.prefill_memory)
    await _requests(prefill, MEMORY_REQUESTS)
    return await asyncio.to_thread(stack.prefill_memory) - before


async def _requests(prefill: Prefill, count: int) -> None:
    for _ in range(count):
        await prefill(0, _SHORT_TOKENS)
