"""Drafts are as long as they pay for: by what was right before, and by what a step of so many rows costs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_daemon.engine.drafts import Source
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.policy import Hits, Policy, WidthCosts, measure

FLAT = [1.0] * 8
STEEP = [float(width) for width in range(1, 9)]  # a row costs as much as a step
NATIVE = [11.1, 11.2, 11.3, 13.8, 15.0, 16.4, 17.8, 19.3]  # SmolLM2 on two cores, milliseconds
SOURCE = Source("some", 0.5)


def policy(costs: list[float]) -> Policy:
    return Policy(WidthCosts(costs))


def taught(costs: list[float], drafted: int, accepted: int, times: int = 40) -> Policy:
    made = policy(costs)
    for _ in range(times):
        made.judged(SOURCE, drafted, accepted)
    return made


def test_drafts_that_are_always_right_are_as_long_as_a_step_is_wide() -> None:
    assert taught(NATIVE, 7, 7).length(SOURCE, 100, 100)[0] == 7
    assert taught(NATIVE, 7, 7).length(SOURCE, 100, 3)[0] == 3


def test_drafts_that_cost_nothing_are_made_whatever_becomes_of_them() -> None:
    assert taught(FLAT, 7, 0).length(SOURCE, 100, 7)[0] > 0


def test_drafts_are_as_long_as_they_were_right_where_more_rows_cost_more() -> None:
    count, speed = taught(NATIVE, 7, 2).length(SOURCE, 100, 7)
    assert count == 2
    assert speed == pytest.approx(3 / NATIVE[2] * NATIVE[0], rel=0.1)


def test_where_rows_cost_as_much_as_steps_nothing_is_drafted_but_a_try_now_and_then() -> None:
    steep = taught(STEEP, 7, 1)
    lengths = [steep.length(SOURCE, 100, 7)[0] for _ in range(15)]
    assert lengths == [0] * 15
    assert steep.length(SOURCE, 100, 7)[0] > 0


def test_after_a_try_as_many_chances_go_by_again_and_tries_that_succeed_bring_drafts_back() -> None:
    made, costs = taught([1.0, *(2.0,) * 7], 7, 0), 0
    for _ in range(600):
        count, speed = made.length(SOURCE, 100, 7)
        costs += 1
        if count:
            made.judged(SOURCE, count, count)
            if speed > 1.0:
                break
    assert 32 <= costs < 600
    assert made.length(SOURCE, 100, 7)[0] == 7


def test_where_no_token_may_be_drafted_none_is() -> None:
    for most in (0, -1):
        assert taught(FLAT, 7, 7).length(SOURCE, 100, most) == (0, 1.0)
    assert policy([1.0]).length(SOURCE, 100, 7) == (0, 1.0)


def test_a_source_is_believed_before_it_has_drafted_and_by_its_drafts_after_that() -> None:
    hits = Hits(0.5, 3)
    assert hits.emitted() == pytest.approx([1, 1.5, 1.75, 1.875])
    for _ in range(100):
        hits.judged(3, 1)
    assert hits.emitted()[1:3] == pytest.approx([1.95, 2.05], abs=0.06)


def test_the_last_answers_drafts_weigh_less_than_a_few_of_this_one() -> None:
    made = taught(NATIVE, 7, 7)
    made.begin()
    assert made.length(SOURCE, 100, 7)[0] == 7
    for _ in range(8):
        made.judged(SOURCE, 7, 0)
    assert made.length(SOURCE, 100, 7)[0] < 3
    kept = taught(NATIVE, 7, 7)
    for _ in range(8):
        kept.judged(SOURCE, 7, 0)
    assert kept.length(SOURCE, 100, 7)[1] > made.length(SOURCE, 100, 7)[1]


def test_what_a_draft_costs_to_make_counts() -> None:
    free, dear = Source("a", 0.9), Source("b", 0.9, token_cost=0.5)
    made = policy(NATIVE)
    assert made.length(free, 100, 7)[1] > made.length(dear, 100, 7)[1]
    assert made.length(free, 100, 7)[0] > made.length(dear, 100, 7)[0]


def test_tokens_that_a_drafter_kept_to_itself_count_as_not_right_and_cost_no_row() -> None:
    costs = [1 + 0.25 * rows for rows in range(8)]
    doubtful, careless = policy(costs), policy(costs)
    for _ in range(100):  # one gives three tokens where they are right and else none, the other gives three each time
        for right in (0, 3):
            doubtful.judged(SOURCE, right, right, asked=3)
            careless.judged(SOURCE, 3, right)
    hits = doubtful._of(SOURCE)
    assert hits.emitted() == pytest.approx(careless._of(SOURCE).emitted())
    assert hits.given()[:3] == pytest.approx([0.5] * 3, abs=0.1)
    assert doubtful.length(SOURCE, 100, 3)[0] == 3
    assert doubtful.length(SOURCE, 100, 3)[1] > 1.2 * careless.length(SOURCE, 100, 3)[1]


def test_a_draft_of_no_token_is_a_try_that_failed() -> None:
    made = policy([1.0, *(2.0,) * 7])
    for _ in range(100):
        made.judged(SOURCE, 0, 0, asked=7)
    assert made._of(SOURCE).emitted() == pytest.approx([1.0] * 8, abs=0.15)


def test_between_two_widths_the_cost_is_between_theirs() -> None:
    costs = WidthCosts([1.0, 2.0, 2.5])
    assert [costs.between(width, 100) for width in (1.0, 1.5, 2.0, 2.5, 3.0)] == pytest.approx([1.0, 1.5, 2.0, 2.25, 2.5])


def mixed(costs: WidthCosts, position: int, row_s: float, wide: float, steps: int = 300) -> None:
    """Steps of one row and of four, which take `wide` times as long."""
    for _ in range(steps):
        costs.observe(1, position, row_s)
        costs.observe(4, position, row_s * wide)


def test_the_cost_of_a_width_follows_its_steps() -> None:
    costs = WidthCosts([0.010] * 8)
    mixed(costs, 100, 0.010, 1.8)
    assert costs.of(1, 100) == 1.0
    assert costs.of(4, 100) == pytest.approx(1.8, rel=0.02)


def test_a_slower_machine_makes_no_width_dearer_and_a_pause_hardly() -> None:
    costs = WidthCosts([0.010, 0.010, 0.010, 0.015])
    for row_s in (0.040, 0.004, 0.010):
        mixed(costs, 100, row_s, 1.5, steps=30)
        assert costs.of(4, 100) == pytest.approx(1.5, rel=0.02)
    for seconds in (*[0.060] * 40, *[0.015] * 40):  # only wide steps meet the busy time
        costs.observe(4, 100, seconds)
    assert costs.of(4, 100) == pytest.approx(1.5, rel=0.02)
    costs.observe(4, 100, 100.0)
    assert costs.of(4, 100) == pytest.approx(1.5, rel=0.05)


def test_what_rows_cost_in_a_long_context_says_nothing_about_a_short_one() -> None:
    costs = WidthCosts([0.010] * 8)
    mixed(costs, 3000, 0.030, 3.0)
    assert costs.of(4, 100) == 1.0
    assert costs.of(4, 3500) == costs.of(4, 8000) == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize(("context_tokens", "widths"), [(64, 8), (5, 5)])
def test_each_width_that_fits_the_context_is_measured(
    tiny: Callable[..., tuple[Path, Any]], context_tokens: int, widths: int
) -> None:
    engine = LlamaEngine.load(
        tiny()[0], dtype=torch.float32, context_tokens=context_tokens, threads=1, step="native", pin=False
    )
    seconds = measure(engine._model)
    assert len(seconds) == widths
    assert all(0 < took < 10 for took in seconds)


def test_longer_drafts_are_tried_again_once_a_source_has_become_right() -> None:
    made = taught([1.0, 1.2, 1.4, 1.5, 1.7, 1.85, 2.0, 2.2], drafted=7, accepted=1)
    assert made.length(SOURCE, 100, 7)[0] <= 2
    for _ in range(40):
        length, _ = made.length(SOURCE, 100, 7)
        made.judged(SOURCE, length, length)
    assert made.length(SOURCE, 100, 7)[0] == 7
