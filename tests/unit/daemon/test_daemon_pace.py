"""How long the engine will take: by its recent pace, and never more than the lease table takes."""

import math

import pytest

from decode_daemon.pace import Pace
from leases.records import MAX_TIME_MS


def test_the_first_step_sets_the_pace_and_later_ones_move_it_slowly() -> None:
    pace = Pace()
    pace.observe(0.25, 1)
    assert pace.time_for_ms(100) == 25_000
    pace.observe(0.41, 1)
    assert pace.token_s == pytest.approx(0.26)
    for _ in range(200):
        pace.observe(0.020, 1)
    assert pace.token_s == pytest.approx(0.020, rel=0.01)


def test_a_step_of_several_tokens_counts_for_each_and_one_of_none_not_at_all() -> None:
    pace = Pace()
    pace.observe(0.5, 4)
    pace.observe(5.0, 0)
    assert pace.time_for_ms(10) == 1_250


def test_nothing_to_do_takes_no_time_and_anything_at_least_a_millisecond() -> None:
    pace = Pace()
    pace.observe(0.000_01, 1)
    assert [pace.time_for_ms(tokens) for tokens in (-1, 0, 1)] == [0, 0, 1]


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.05, 1e300, math.inf, math.nan])
@pytest.mark.parametrize("tokens", [0, 1, 2**32, 10**400])
def test_every_estimate_is_a_whole_number_that_the_table_takes(seconds: float, tokens: int) -> None:
    pace = Pace()
    pace.observe(seconds, 1)
    assert 0 <= pace.time_for_ms(tokens) <= MAX_TIME_MS


def test_before_the_first_step_something_is_assumed() -> None:
    assert 0 < Pace().time_for_ms(100) < MAX_TIME_MS
