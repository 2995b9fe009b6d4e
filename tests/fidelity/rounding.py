"""Where arithmetic rounds, the lanes part at near ties: is each token of the lane one that vLLM could have taken there?

Every answer's ids are fed back to plain vLLM, which tells how far each is behind its own choice. Not even its own answers are
always that choice: it made them token by token, in batches, and reads them in one pass. So its own answers to the same prompts
are judged beside the lane's, and the lane's may be behind no further, and at no more than MOST_TIES times as many tokens.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from openai import AsyncOpenAI

from cli.neartie import gaps
from tests.fidelity.answer import Answer
from tests.fidelity.case import MODEL, chat
from tests.fidelity.prompts import Prompt
from tests.fidelity.stacks import Running

TOKENS = 256
"""Of an answer in `make fidelity`."""

MOST_TIES = 2
"""Of 50 answers of 256 tokens of SmolLM2 in bfloat16, 67 of vLLM's own tokens were near ties, and 88 of the lane's."""

SPARE_TIES = 3  # so many in a short run are chance

_READ_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Gaps:
    """How far tokens are behind vLLM's choices, in nats; 0 where a token is its choice, or exactly as likely."""

    values: tuple[float, ...]

    @classmethod
    def joined(cls, several: Iterable["Gaps"]) -> Self:
        """Put those of several answers together."""
        return cls(tuple(value for one in several for value in one.values))

    @property
    def ties(self) -> int:
        """Tokens that are not vLLM's choice."""
        return sum(value > 0 for value in self.values)

    @property
    def worst(self) -> float:
        """The furthest behind; 0 where there is none."""
        return max(self.values, default=0.0)


@dataclass(frozen=True, slots=True)
class Rounded:
    """The answers to one prompt: the lane's, vLLM's own, and the lane's with one token in its middle exchanged."""

    prompt: Prompt
    lane: Gaps
    own: Gaps
    corrupted: Gaps


@dataclass(frozen=True, slots=True)
class Judgement:
    """What came of all prompts. `least` nats behind are always allowed: what rounding can do, whether it did or not.

    `drafted` counts tokens that speculation gave the lane, `resumed` answers that vLLM finished.
    """

    answers: tuple[Rounded, ...]
    least: float
    drafted: int
    resumed: int

    @property
    def allowed(self) -> float:
        """How far a token of the lane may be behind, in nats."""
        return max(self.least, Gaps.joined(one.own for one in self.answers).worst)

    @property
    def most_ties(self) -> int:
        """How many tokens of the lane may be behind at all."""
        return MOST_TIES * Gaps.joined(one.own for one in self.answers).ties + SPARE_TIES

    def refuses(self, gaps: Gaps) -> bool:
        """Whether an answer is not one that vLLM could have given."""
        return gaps.worst > self.allowed

    def faults(self) -> list[str]:
        """Say what is not as it should be: of the lane's answers, and of this check itself."""
        wrong = [one for one in self.answers if self.refuses(one.lane)]
        found = [f"{one.prompt.text[:40]!r}: a token is {one.lane.worst:.3f} nats behind vLLM's choice" for one in wrong]
        ties = Gaps.joined(one.lane for one in self.answers).ties
        if ties > self.most_ties:
            found.append(f"{ties} tokens are near ties, where {self.most_ties} are allowed")
        found += [
            f"{one.prompt.text[:40]!r}: a wrong token was not noticed"
            for one in self.answers
            if not self.refuses(one.corrupted)
        ]
        if not self.drafted:
            found.append("no token came from speculation")
        if self.resumed:
            found.append(f"vLLM finished {self.resumed} answers of the lane")
        return found


async def judge(
    running: Running, asked: Sequence[Prompt], tokens: int, least: float, *, told: Callable[[str], None] = lambda _: None
) -> Judgement:
    """Have each prompt answered by both lanes, with so many tokens, and have vLLM judge every one of them."""
    told(f"{len(asked)} answers of {tokens} tokens by plain vLLM")
    own = await asyncio.gather(*(_answer(running, prompt, tokens, in_lane=False) for prompt in asked))
    before = await _counts(running)
    told("the same by the lane")
    lane = await asyncio.gather(*(_answer(running, prompt, tokens, in_lane=True) for prompt in asked))
    drafted, resumed = (int(now - then) for now, then in zip(await _counts(running), before, strict=True))
    told("every token of both read by plain vLLM")
    at_once = asyncio.Semaphore(_READ_AT_ONCE)
    async with AsyncOpenAI(base_url=running.base_url, api_key="-", max_retries=0) as client:

        async def behind(answer: Answer, change: Callable[[list[int]], list[int]] = list) -> Gaps:
            prompt, ids = answer.value["prompt_token_ids"], answer.value["choices"][0]["token_ids"]
            async with at_once:
                return Gaps(tuple(await gaps(client, MODEL, prompt, change(ids))))

        async def one(prompt: Prompt, lane: Answer, own: Answer) -> Rounded:
            return Rounded(prompt, await behind(lane), await behind(own), await behind(lane, corrupted))

        answers = await asyncio.gather(*map(one, asked, lane, own))
    return Judgement(tuple(answers), least, drafted, resumed)


def corrupted(ids: list[int]) -> list[int]:
    """Exchange the token in the middle for another one of the same answer."""
    middle = len(ids) // 2
    other = next(token for token in ids if token != ids[middle])
    return [*ids[:middle], other, *ids[middle + 1 :]]


async def _answer(running: Running, prompt: Prompt, tokens: int, *, in_lane: bool) -> Answer:
    fields: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
    case = chat(prompt.text, question=prompt.text, **fields)
    answer = await (running.both.lane(case) if in_lane else running.both.send(case, in_lane=False))
    assert answer.status == 200, answer.raw
    assert answer.lane == ("latency" if in_lane else ""), answer.reason
    assert len(answer.value["choices"][0]["token_ids"]) == tokens
    return answer


async def _counts(running: Running) -> tuple[float, float]:
    return await running.lane.metric("decode", "anchorleg_decode_accepted_tokens_total"), await running.resumed()
