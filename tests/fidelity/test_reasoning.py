"""The lane's answers are vLLM's where vLLM's parser of reasoning takes answers apart."""

import pytest
import pytest_asyncio

from tests.fidelity.case import Case
from tests.fidelity.catalogue import REASONING, chosen, new
from tests.fidelity.lanes import Outcome
from tests.fidelity.stacks import Running

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def outcomes(reasoning: Running, request: pytest.FixtureRequest) -> dict[str, Outcome]:
    cases = chosen(request.session.items, REASONING)
    return {outcome.case.name: outcome for outcome in await reasoning.both.outcomes(cases)}


@pytest.mark.parametrize("case", new(REASONING), ids=str)
async def test_both_lanes_give_the_same_answer(outcomes: dict[str, Outcome], case: Case) -> None:
    outcome = outcomes[case.name]
    assert outcome.holds, str(outcome)


async def test_no_answer_of_the_lane_was_finished_by_vllm(outcomes: dict[str, Outcome], reasoning: Running) -> None:
    assert outcomes
    assert await reasoning.resumed() == 0


async def test_the_lane_gives_thoughts_an_answer_and_a_call(reasoning: Running) -> None:
    """What the cases are for: an answer without any of them would be equal, too."""
    told = {}
    for case in REASONING:
        if case.name in ("chat: reasoning: thoughts, then an answer", "chat: reasoning: thoughts, then a call"):
            answer = await reasoning.both.lane(case)
            message = answer.value["choices"][0]["message"]
            told[case.name] = (answer.lane, *(bool(message.get(part)) for part in ("reasoning", "content", "tool_calls")))
            assert answer.value["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert list(told.values()) == [("latency", True, True, False), ("latency", True, False, True)]
