"""The lane's answers are vLLM's: every case down both lanes, compared field by field."""

import pytest
import pytest_asyncio

from tests.fidelity.case import Case, Path
from tests.fidelity.catalogue import CASES, chosen, new
from tests.fidelity.lanes import Outcome
from tests.fidelity.stacks import Running

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

LEAST_IN_THE_LANE = 150
MOST_NEAR_TIES = 0.02


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def outcomes(running: Running, request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Return what came of the chosen cases; they are sent at once, because vLLM is fast only in batches."""
    cases = chosen(request.session.items, CASES)
    return {outcome.case.name: outcome for outcome in await running.both.outcomes(cases)}


@pytest.mark.parametrize("case", new(CASES), ids=str)
async def test_both_lanes_give_the_same_answer(outcomes: dict[str, Outcome], case: Case) -> None:
    outcome = outcomes[case.name]
    assert outcome.holds, str(outcome)


async def test_near_ties_are_rare(outcomes: dict[str, Outcome]) -> None:
    ties = [name for name, outcome in outcomes.items() if outcome.near_tie is not None]
    assert len(ties) <= max(1, MOST_NEAR_TIES * len(outcomes)), ties


async def test_every_field_of_vllms_requests_is_in_some_case(running: Running) -> None:
    schemas = (await running.both.client.get("/openapi.json")).json()["components"]["schemas"]
    tried = {field for case in CASES if case.path in tuple(Path) for field in case.fields}
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        assert not schemas[name]["properties"].keys() - tried


async def test_the_lane_itself_serves_most_of_what_it_is_asked(running: Running) -> None:
    served = [case for case in new(CASES) if case.reason is None and not case.error]
    assert len(served) >= LEAST_IN_THE_LANE


async def test_no_answer_of_the_lane_was_finished_by_vllm(outcomes: dict[str, Outcome], running: Running) -> None:
    assert outcomes
    assert await running.resumed() == 0


async def test_afterwards_nothing_is_held_anywhere(outcomes: dict[str, Outcome], running: Running) -> None:
    assert outcomes
    await running.quiet()
