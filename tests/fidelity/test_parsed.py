"""The lane's answers are vLLM's where vLLM's parsers take answers apart, and where the model has generation defaults."""

import pytest
import pytest_asyncio

from tests.fidelity.case import Case, chat
from tests.fidelity.catalogue import PARSED, chosen, new
from tests.fidelity.lanes import Outcome
from tests.fidelity.stacks import Running

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def outcomes(parsing: Running, request: pytest.FixtureRequest) -> dict[str, Outcome]:
    return {outcome.case.name: outcome for outcome in await parsing.both.outcomes(chosen(request.session.items, PARSED))}


@pytest.mark.parametrize("case", new(PARSED), ids=str)
async def test_both_lanes_give_the_same_answer(outcomes: dict[str, Outcome], case: Case) -> None:
    outcome = outcomes[case.name]
    assert outcome.holds, str(outcome)


async def test_no_answer_of_the_lane_was_finished_by_vllm(outcomes: dict[str, Outcome], parsing: Running) -> None:
    assert outcomes
    assert await parsing.resumed() == 0


async def test_a_prompt_that_is_another_one_when_it_is_rendered_again_is_left_to_vllm(
    outcomes: dict[str, Outcome], parsing: Running
) -> None:
    """A9: tools have the prompt rendered before it is prefilled; a template that reads the clock makes two of it."""
    assert outcomes, "this comes after the cases, of which vLLM finishes none"
    before = await parsing.lane.metric("extproc", "anchorleg_resumed_total", reason="no_handoff", way="whole")
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
    answer = await parsing.both.lane(chat("clock", tools=[tool], chat_template_kwargs={"clock": True}, max_tokens=4))
    assert (answer.status, answer.value["usage"]["completion_tokens"]) == (200, 4)
    assert await parsing.lane.metric("extproc", "anchorleg_resumed_total", reason="no_handoff", way="whole") == before + 1
