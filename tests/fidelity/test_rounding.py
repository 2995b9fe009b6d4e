"""Each token of the lane is one that vLLM could have taken: a short form, in float32; `make fidelity` has it in bfloat16."""

from dataclasses import replace

import pytest

from tests.fidelity.near_tie import CLOSE
from tests.fidelity.prompts import prompts
from tests.fidelity.rounding import Gaps, Judgement, Rounded, corrupted, judge
from tests.fidelity.stacks import Running

ULP = 0.125  # of a logit between 16 and 32 in bfloat16
CHOICES = Gaps((0.0,) * 100)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.timeout(600)
async def test_every_token_is_vllms_choice_and_an_exchanged_one_is_noticed(running: Running) -> None:
    judgement = await judge(running, prompts(5), 32, CLOSE)
    assert judgement.faults() == []
    assert len(Gaps.joined(one.lane for one in judgement.answers).values) == 5 * 32


def behind(*values: float) -> Gaps:
    return Gaps((*values, *CHOICES.values[len(values) :]))


def judged(lane: Gaps, own: Gaps = CHOICES) -> Judgement:
    return Judgement((Rounded(prompts(1)[0], lane, own, behind(9.0)),), 2 * ULP, drafted=1, resumed=0)


def test_near_ties_as_vllm_has_them_itself_are_no_fault() -> None:
    assert judged(behind(*[ULP] * 6, 2 * ULP), behind(*[ULP] * 4)).faults() == []
    assert judged(behind(5 * ULP), behind(5 * ULP)).faults() == []


def test_a_token_further_behind_than_any_of_vllms_own_is_a_fault() -> None:
    [fault] = judged(behind(3 * ULP), behind(2 * ULP)).faults()
    assert "is 0.375 nats behind" in fault


def test_more_near_ties_than_vllm_has_itself_are_a_fault() -> None:
    assert judged(behind(*[ULP] * 11), behind(*[ULP] * 4)).faults() == []
    assert judged(behind(*[ULP] * 12), behind(*[ULP] * 4)).faults() == ["12 tokens are near ties, where 11 are allowed"]


def test_a_check_that_does_not_notice_a_wrong_token_is_a_fault() -> None:
    good = judged(CHOICES)
    [fault] = replace(good, answers=(replace(good.answers[0], corrupted=behind(ULP)),)).faults()
    assert "a wrong token was not noticed" in fault
    assert corrupted([7, 7, 8, 7]) == [7, 7, 7, 7]
    assert corrupted([7, 8, 7]) == [7, 7, 7]


def test_answers_that_are_not_the_lanes_own_prove_nothing() -> None:
    assert replace(judged(CHOICES), drafted=0).faults() == ["no token came from speculation"]
    assert replace(judged(CHOICES), resumed=2).faults() == ["vLLM finished 2 answers of the lane"]


def test_there_are_fifty_different_prompts_of_three_kinds() -> None:
    texts = [prompt.text for prompt in prompts(50)]
    assert len(set(texts)) == 50
    assert prompts(51) == prompts(50)
    assert [prompt.kind for prompt in prompts(4)] == ["chat", "code", "copy", "chat"]
