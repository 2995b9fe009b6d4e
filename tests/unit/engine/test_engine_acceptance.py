"""What an answer takes of a draft: rows are looked at in order, and none after the first that was not foretold."""

from collections.abc import Iterator

import pytest
import torch

from decode_daemon.engine.acceptance import Limits, Verdict, judge
from decode_daemon.engine.protocol import EngineError, FinishReason, SamplingParams, TokenLogprobs
from decode_daemon.engine.sampling import Choice, Sampler

FREE = Limits(frozenset(), 100)
ROWS = [4, 5, 6, 7]  # what the rows of a step choose


class Accepting(Sampler):
    """Remembers what it accepted when each row was asked for; refuses 9."""

    def __init__(self) -> None:
        super().__init__(SamplingParams(0.0), 10)
        self.accepted: list[int] = []
        self.asked: list[list[int]] = []

    def accept(self, ids: tuple[int, ...]) -> None:  # type: ignore[override]
        if 9 in ids:
            raise EngineError("no 9 here")
        self.accepted += ids

    def rows(self, chosen: list[int]) -> Iterator[Choice]:
        for token in chosen:
            self.asked.append(list(self.accepted))
            yield Choice(token, TokenLogprobs(-float(token), (), ()))


def judged(draft: list[int], limits: Limits = FREE, rows: list[int] = ROWS) -> tuple[Verdict, Accepting]:
    sampler = Accepting()
    return judge(sampler.rows(rows), draft, 10, sampler, limits), sampler


@pytest.mark.parametrize(
    ("draft", "ids", "accepted"),
    [
        ([4, 5, 6], (4, 5, 6, 7), 3),
        ([4, 5, 0], (4, 5, 6), 2),
        ([0, 5, 6], (4,), 0),
        ([], (4,), 0),
    ],
)
def test_tokens_are_taken_up_to_the_first_that_was_not_foretold(draft: list[int], ids: tuple[int, ...], accepted: int) -> None:
    verdict, sampler = judged(draft)
    assert (verdict.ids, verdict.accepted, verdict.finish, verdict.error) == (ids, accepted, None, None)
    assert [one.logprob for one in verdict.logprobs] == [-float(token) for token in ids]
    assert sampler.accepted == list(ids)


def test_each_row_is_asked_for_after_the_tokens_before_it_and_none_after_a_wrong_draft() -> None:
    assert judged([4, 5, 6])[1].asked == [[], [4], [4, 5], [4, 5, 6]]
    assert judged([4, 0, 6])[1].asked == [[], [4]]


@pytest.mark.parametrize(
    ("limits", "ids", "finish"),
    [
        (Limits(frozenset({5}), 100), (4, 5), FinishReason.STOP),
        (Limits(frozenset({7}), 100), (4, 5, 6, 7), FinishReason.STOP),
        (Limits(frozenset(), 12), (4, 5), FinishReason.LENGTH),
        (Limits(frozenset({5}), 12), (4, 5), FinishReason.STOP),
        (Limits(frozenset(), 11), (4,), FinishReason.LENGTH),
    ],
)
def test_an_end_among_the_tokens_is_the_answers_end(limits: Limits, ids: tuple[int, ...], finish: FinishReason) -> None:
    verdict, _ = judged([4, 5, 6], limits)
    assert (verdict.ids, verdict.finish) == (ids, finish)


def test_what_cannot_go_on_keeps_the_tokens_before_it() -> None:
    verdict, _ = judged([4, 9, 6], rows=[4, 9, 6, 7])
    assert verdict.ids == (4,)
    assert str(verdict.error) == "no 9 here"
    with pytest.raises(EngineError, match="no 9 here"):
        judged([9], rows=[9, 1])


def test_a_position_draws_its_own_number_whatever_step_it_is_drawn_in() -> None:
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(1.0, seed=5)

    def drawn(sampler: Sampler, rows: range) -> Iterator[Choice]:
        return (sampler.choose(logits[row], 10 + row) for row in rows)

    single = Sampler(params, 10)
    wanted = [judge(drawn(single, range(row, row + 1)), [], 10 + row, single, FREE).ids[0] for row in range(4)]
    together = Sampler(params, 10)
    assert judge(drawn(together, range(4)), wanted[:3], 10, together, FREE).ids == tuple(wanted)
