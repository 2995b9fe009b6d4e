"""What a token is chosen from depends on the answer before it, and on nothing else."""

import math
from collections.abc import Sequence

import pytest
import torch

from decode_daemon.engine.protocol import EngineError, SamplingParams, TokenLogprobs
from decode_daemon.engine.sampling import Sampler

LOGITS = torch.tensor([1.2, -0.4, 2.1, 0.3, -1.7, 0.9, 1.6, -0.2, 0.0, 0.6])
VOCAB = len(LOGITS)
BEST, SECOND, THIRD = 2, 6, 0
GREEDY = SamplingParams(0.0)


class Recorded:
    """A constraint that allows the given ids, and remembers what it was told."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed
        self.accepted: list[int] = []

    def mask(self) -> torch.Tensor | None:
        return torch.tensor([token in self.allowed for token in range(VOCAB)]) if self.allowed else None

    def accept(self, token: int) -> None:
        if token == 9:
            raise EngineError("token 9 does not match the grammar")
        self.accepted.append(token)


def after(
    params: SamplingParams, answer: Sequence[int], constraint: Recorded | None = None, prompt: Sequence[int] = ()
) -> Sampler:
    sampler = Sampler(params, VOCAB, prompt_ids=prompt, constraint=constraint)
    sampler.accept(answer)
    return sampler


def chosen(sampler: Sampler) -> int:
    return sampler.choose(LOGITS, 5).token


@pytest.mark.parametrize(
    ("answer", "expected"),
    [([], BEST), ([1], BEST), ([3], SECOND), ([1, 3], SECOND), ([3, 1], BEST), ([5, 1, 3], THIRD), ([1, 5, 1, 3], THIRD)],
)
def test_a_bad_words_last_id_is_withheld_where_the_answer_ends_with_the_others(answer: list[int], expected: int) -> None:
    params = SamplingParams(0.0, bad_words=((3, BEST), (5, 1, 3, SECOND), (7, 7, 7, 7, 7, BEST)))
    assert chosen(after(params, answer)) == expected


def test_a_bad_word_of_one_id_is_always_withheld() -> None:
    params = SamplingParams(0.0, bad_words=((BEST,), (SECOND,)))
    assert [chosen(after(params, answer)) for answer in ([], [4], [BEST])] == [THIRD] * 3


def test_a_bad_word_that_begins_in_the_prompt_is_allowed() -> None:
    params = SamplingParams(0.0, bad_words=((3, 1, BEST),))
    assert chosen(after(params, [1], prompt=[3])) == BEST
    assert chosen(after(params, [], prompt=[3, 1])) == BEST


def test_min_tokens_withholds_the_ending_ids_until_the_answer_is_long_enough() -> None:
    sampler = Sampler(SamplingParams(0.0, min_tokens=3, ending_token_ids=frozenset({BEST, 6})), VOCAB)
    seen = []
    for _ in range(4):
        seen.append(chosen(sampler))
        sampler.accept([1])
    assert seen == [THIRD, THIRD, THIRD, BEST]


def test_min_tokens_lets_an_answer_end_that_its_constraint_lets_go_nowhere_else() -> None:
    params = SamplingParams(0.0, min_tokens=3, ending_token_ids=frozenset({BEST, 4}))
    assert chosen(after(params, [1], Recorded(BEST))) == BEST
    assert chosen(after(params, [1], Recorded(4))) == 4
    assert chosen(after(params, [1], Recorded(BEST, 8))) == 8


def test_min_tokens_without_a_constraint_may_leave_nothing() -> None:
    params = SamplingParams(0.0, min_tokens=3, ending_token_ids=frozenset({BEST}), allowed_token_ids=(BEST,))
    with pytest.raises(EngineError, match=r"no id is left for position 5.*allowed_token_ids"):
        chosen(after(params, [1]))
    assert chosen(after(params, [1, 1, 1])) == BEST


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_that_allows_no_id_is_an_error_not_a_token(temperature: float) -> None:
    with pytest.raises(EngineError, match="no id is left for position 5"):
        chosen(after(SamplingParams(temperature, allowed_token_ids=(1, 2)), [], Recorded(3)))


def test_a_constraint_that_allows_every_id_has_no_mask() -> None:
    assert chosen(after(GREEDY, [1], Recorded())) == BEST


def test_a_constraint_is_told_every_token_in_order_and_may_refuse_one() -> None:
    constraint = Recorded(1, 2, 3)
    sampler = after(GREEDY, [1, 2, 3], constraint)
    sampler.choose(LOGITS, 0)
    assert constraint.accepted == [1, 2, 3]
    with pytest.raises(EngineError, match="token 9 does not match the grammar"):
        sampler.accept([9])


def test_a_bias_can_lift_a_token_over_all_others_and_never_over_a_mask() -> None:
    params = SamplingParams(0.0, logit_bias={4: 100.0, BEST: -100.0})
    assert chosen(after(params, [])) == 4
    assert chosen(after(params, [], Recorded(BEST, 8))) == 8


def test_logprobs_are_those_of_the_model_under_the_constraint_not_of_what_was_drawn_from() -> None:
    params = SamplingParams(
        0.3, top_k=1, logit_bias={4: 100.0}, presence_penalty=2.0, repetition_penalty=1.5, allowed_token_ids=(4, 5), logprobs=3
    )
    choice = after(params, [4, 4], Recorded(4, 5, 6)).choose(LOGITS, 5)
    total = sum(math.exp(LOGITS[token]) for token in (4, 5, 6))
    exact = [float(LOGITS[token]) - math.log(total) for token in (6, 5, 4)]
    assert choice.token == 4
    assert choice.logprobs is not None
    assert choice.logprobs.top_ids == (6, 5, 4)
    assert choice.logprobs.top_logprobs == pytest.approx(exact)
    assert choice.logprobs.logprob == pytest.approx(exact[2])


def test_alternatives_behind_the_mask_are_minus_infinity() -> None:
    choice = after(SamplingParams(0.0, logprobs=2), [], Recorded(7)).choose(LOGITS, 5)
    assert choice.token == 7
    assert choice.logprobs is not None
    assert (choice.logprobs.logprob, choice.logprobs.top_logprobs) == (0.0, (0.0, -math.inf))


def test_logprobs_zero_tell_the_chosen_token_alone_and_none_tell_nothing() -> None:
    assert Sampler(GREEDY, VOCAB).choose(LOGITS, 5).logprobs is None
    told = Sampler(SamplingParams(0.0, logprobs=0), VOCAB).choose(LOGITS, 5).logprobs
    assert told == TokenLogprobs(float(LOGITS.log_softmax(0)[BEST]), (), ())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0.5),
        SamplingParams(0.0, logprobs=0),
        SamplingParams(0.0, presence_penalty=0.1),
        SamplingParams(0.0, frequency_penalty=0.1),
        SamplingParams(0.0, repetition_penalty=1.1),
        SamplingParams(0.0, logit_bias={1: 1.0}),
        SamplingParams(0.0, allowed_token_ids=(1,)),
        SamplingParams(0.0, bad_words=((1,),)),
        SamplingParams(0.0, min_tokens=4, ending_token_ids=frozenset({1})),
    ],
)
def test_the_model_may_not_choose_where_more_than_the_largest_logit_matters(params: SamplingParams) -> None:
    assert not after(params, [1, 2, 3]).takes_the_largest


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(0.0, top_k=3, top_p=0.1, min_p=0.9, seed=5),
        SamplingParams(0.0, min_tokens=4),
        SamplingParams(0.0, min_tokens=3, ending_token_ids=frozenset({1})),
    ],
)
def test_the_model_may_choose_where_only_the_largest_logit_matters(params: SamplingParams) -> None:
    assert after(params, [1, 2, 3]).takes_the_largest
    assert not after(params, [1, 2, 3], Recorded()).takes_the_largest


@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0), SamplingParams(1.0, allowed_token_ids=(1, 2), min_p=0.1)])
def test_logits_that_are_not_finite_are_refused(damage: float, params: SamplingParams) -> None:
    logits = LOGITS.clone()
    logits[4] = damage
    with pytest.raises(EngineError, match="logits for position 9 are not finite"):
        Sampler(params, VOCAB).choose(logits, 9)


@pytest.mark.parametrize(("penalty", "temperature"), [(1e-37, 0.01), (1e-42, 1.0), (1e-300, 2.0), (1e-300, 0.0)])
def test_a_penalty_that_leaves_float32_is_an_error_not_a_token(penalty: float, temperature: float) -> None:
    params = SamplingParams(temperature, repetition_penalty=penalty, bad_words=((1,),))
    with pytest.raises(EngineError, match=f"repetition_penalty {penalty} and temperature {temperature}"):
        chosen(after(params, [BEST, 1, 4]))


@pytest.mark.parametrize(
    "params", [SamplingParams(1.0, seed=3), SamplingParams(0.0, frequency_penalty=1.0, bad_words=((BEST,),))]
)
def test_choosing_changes_neither_the_logits_nor_the_next_choice(params: SamplingParams) -> None:
    sampler, logits = after(params, [BEST, BEST]), LOGITS.clone()
    assert sampler.choose(logits, 5) == sampler.choose(logits, 5)
    assert torch.equal(logits, LOGITS)
