"""Drawn tokens follow vLLM's distribution on both sides of the handoff."""

import pytest

from tests.fidelity.sampling import REST, SETTINGS, Setting, chosen, draw, fit
from tests.fidelity.stacks import Running

pytestmark = pytest.mark.timeout(600)
on_the_stacks_loop = pytest.mark.asyncio(loop_scope="session")

DRAWS = 200  # `make fidelity` draws more
LEAST = 1e-3


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@on_the_stacks_loop
async def test_two_tokens_are_drawn_as_vllm_draws_them(running: Running, setting: Setting) -> None:
    drawn = await draw(running.both, setting, DRAWS)
    assert drawn.holds, drawn


def test_the_test_notices_another_distribution() -> None:
    expected = {(1, 1): 0.5, (1, 2): 0.3, (2, 1): 0.2, REST: 0.0}
    assert fit({(1, 1): 100, (1, 2): 60, (2, 1): 40}, expected).probability == pytest.approx(1.0)
    assert fit({(1, 1): 130, (1, 2): 40, (2, 1): 30}, expected).probability < LEAST


def test_the_order_of_truncations_is_vllms() -> None:
    logprobs = dict(enumerate([-0.5, -1.5, -2.0, -4.0, -9.0]))
    assert list(chosen(logprobs, {"min_p": 0.1, "top_k": 4}, ())) == [0, 1, 2]
    assert list(chosen(logprobs, {"top_k": 3, "top_p": 0.7}, ())) == [0, 1]
    assert list(chosen(logprobs, {"presence_penalty": 2.0, "top_k": 2}, (0,))) == [1, 2]
