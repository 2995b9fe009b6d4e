"""With speculation on, greedy answers are those without it, byte for byte: every width, every native step, any drafts."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from decode_daemon.engine.cpu.build import library
from decode_daemon.engine.cpu.native import INSTRUCTIONS, MAX_WIDTH, Library, NativeModel
from decode_daemon.engine.drafts import Drafter, NgramDrafter
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.model import rms_norm
from decode_daemon.engine.policy import Policy, WidthCosts
from decode_daemon.engine.protocol import DecodeParams, EngineError, FinishReason, SamplingParams
from decode_daemon.engine.speculation import Speculation
from tests.kit.drafters import Oracle, always
from tests.kit.speculating import CONTEXT, FIRST, VOCAB, answered, land, native_model, told

Tiny = Callable[..., tuple[Path, Any]]

PROMPT = [5, 90, 3, 41]
GREEDY = SamplingParams(0.0)
COUNTS = range(1, MAX_WIDTH)


def greedy(max_tokens: int = 40, stop: frozenset[int] = frozenset(), speculate: bool = True) -> DecodeParams:
    return DecodeParams(GREEDY, max_tokens, stop, speculate=speculate)


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest) -> str:
    if not Library(library()).supports(request.param.encode()):
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


@pytest.fixture
def model(tiny: Tiny) -> NativeModel:
    return native_model(tiny()[0], torch.bfloat16, "avx2")


def drafters(answer: list[int]) -> list[Drafter]:
    """One of prompt lookup, one that is always right, and some that err at one place of each draft or at all."""
    wrong = [(0,), (1,), (4,), tuple(range(MAX_WIDTH))]
    return [NgramDrafter(), Oracle(answer, VOCAB), *(Oracle(answer, VOCAB, mistaken) for mistaken in wrong)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "changes"), [("Llama", {}), ("Qwen3", {"num_key_value_heads": 6})])
def test_greedy_answers_and_their_kv_are_the_same_for_every_width_and_any_drafts(
    tiny: Tiny, instructions: str, family: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    model = native_model(tiny(family, **changes)[0], dtype, instructions)
    for prompt in (PROMPT, [9] * 20):
        plain = answered(LlamaEngine(model), prompt, greedy())
        kept = model.cache[:, :, :, : len(prompt) + 39].clone()
        for drafter in drafters(plain[0]):
            for count in COUNTS:
                assert answered(LlamaEngine(model, always(model, count, drafter)), prompt, greedy()) == plain
                assert torch.equal(model.cache[:, :, :, : len(prompt) + 39], kept)


def test_drafts_that_are_all_right_make_steps_of_as_many_tokens_and_one_more(model: NativeModel) -> None:
    plain = answered(LlamaEngine(model), PROMPT, greedy(41))
    for count in COUNTS:
        speculation = always(model, count, Oracle(plain[0], VOCAB))
        answer, steps = told(LlamaEngine(model, speculation), PROMPT, greedy(41))
        assert answer == plain
        assert {len(step.ids) for step in steps[:-1]} == {count + 1}
        assert all(step.accepted == step.drafted == len(step.ids) - 1 for step in steps[:-1])
        assert len(steps) == -(-40 // (count + 1))


def test_drafts_that_are_all_wrong_make_steps_of_one_token(model: NativeModel) -> None:
    plain, single = told(LlamaEngine(model), PROMPT, greedy())
    speculation = always(model, 5, Oracle(plain[0], VOCAB, mistaken=(0,)))
    answer, steps = told(LlamaEngine(model, speculation), PROMPT, greedy())
    assert answer == plain
    assert [step.ids for step in steps] == [step.ids for step in single]
    assert {step.accepted for step in steps} == {0}


@pytest.mark.parametrize("count", [1, 4, 7])
def test_an_answer_ends_where_it_would_without_drafts(model: NativeModel, count: int) -> None:
    free = answered(LlamaEngine(model), PROMPT, greedy())[0]
    for length in range(1, 20):
        for stop in (frozenset[int](), frozenset({free[length]}), frozenset({FIRST})):
            for wanted in (greedy(length, stop), greedy(40, stop)):
                plain = answered(LlamaEngine(model), PROMPT, wanted)
                for drafter in drafters([*free, *free]):
                    assert answered(LlamaEngine(model, always(model, count, drafter)), PROMPT, wanted) == plain


def test_the_contexts_end_is_reached_and_never_passed(model: NativeModel) -> None:
    for prompt in ([1] * (CONTEXT - tokens) for tokens in range(1, 12)):
        plain = answered(LlamaEngine(model), prompt, greedy(1000))
        assert plain[2] is FinishReason.LENGTH
        for count in COUNTS:
            speculation = always(model, count, Oracle(plain[0], VOCAB))
            assert answered(LlamaEngine(model, speculation), prompt, greedy(1000)) == plain


def test_a_request_may_ask_for_one_token_a_step(model: NativeModel) -> None:
    plain = answered(LlamaEngine(model), PROMPT, greedy())
    engine = LlamaEngine(model, always(model, 7, Oracle(plain[0], VOCAB)))
    answer, steps = told(engine, PROMPT, greedy(speculate=False))
    assert answer == plain
    assert {(len(step.ids), step.drafted, step.accepted) for step in steps} == {(1, 0, 0)}


def test_an_answer_that_breaks_off_does_so_after_the_same_tokens(tiny: Tiny, instructions: str) -> None:
    model = native_model(tiny()[0], torch.float32, instructions)
    free = answered(LlamaEngine(model), PROMPT, greedy())[0]
    damaged = free[9]  # what follows this id has no finite logits
    model._kept[0].embedding[damaged] = torch.nan
    plain = answered(LlamaEngine(model), PROMPT, greedy())
    assert plain[0] == free[: free.index(damaged) + 1]
    assert "are not finite" in plain[3]
    for params in (greedy(), DecodeParams(SamplingParams(0.0, logprobs=1), 40, frozenset())):
        plain = answered(LlamaEngine(model), PROMPT, params)
        for drafter in drafters(free):
            for count in COUNTS:
                assert answered(LlamaEngine(model, always(model, count, drafter)), PROMPT, params) == plain


def test_cancelling_takes_effect_after_the_step_that_is_under_way(model: NativeModel) -> None:
    plain = answered(LlamaEngine(model), PROMPT, greedy())
    engine = LlamaEngine(model, always(model, 3, Oracle(plain[0], VOCAB)))
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) == 3

    (ids, _, finish, _), steps = told(engine, PROMPT, greedy(), cancelled)
    assert (ids, finish, len(steps)) == (plain[0][:8], None, 2)


def test_two_hundred_requests_leave_nothing_behind(model: NativeModel) -> None:
    engine, plain = LlamaEngine(model, always(model, 5, NgramDrafter())), LlamaEngine(model)
    random, drafted = Random(3), 0
    for _ in range(200):
        some = [random.randrange(VOCAB) for _ in range(random.randint(2, 12))]
        prompt = (some * 12)[: random.randint(2, 50)]
        params = DecodeParams(
            SamplingParams(random.choice([0.0, 0.8]), top_k=5, seed=random.randrange(99)),
            random.randint(1, 50),
            frozenset(some[:1]),
        )
        patience, attention = random.choice([0, 2, 99]), random.choice([1, 3, 99])
        land(engine, prompt)
        seen: list[int] = []
        for step in engine.decode(prompt, FIRST, params, lambda seen=seen, patience=patience: len(seen) > patience):  # type: ignore[misc]
            seen += step.ids
            drafted += step.drafted
            if len(seen) > attention:
                break
        whole = answered(plain, prompt, params)[0]
        assert seen == whole[: len(seen)]
    assert drafted > 200
    assert answered(engine, PROMPT, greedy()) == answered(plain, PROMPT, greedy())


class Unchanging(WidthCosts):
    """Costs of another model than the tiny one."""

    def observe(self, width: int, position: int, seconds: float) -> None:
        """Learn nothing."""


def test_drafts_come_from_who_is_right(model: NativeModel) -> None:
    plain = answered(LlamaEngine(model), PROMPT, greedy(60))
    wrong, right = Oracle(plain[0], VOCAB, (0,), name="wrong"), Oracle(plain[0], VOCAB, name="right")
    policy = Policy(Unchanging([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]))
    answer, steps = told(LlamaEngine(model, Speculation(model, [wrong, right], policy)), PROMPT, greedy(60))
    assert answer == plain
    assert sum(len(step.ids) for step in steps[5:]) > 4 * len(steps[5:])


class Head(Oracle):
    """A draft head as far as the engine sees it; keeps what it is told."""

    wants_hidden = True

    def begin(self, ids: Any) -> None:
        super().begin(ids)
        self.told: list[tuple[list[int], torch.Tensor]] = []

    def saw(self, ids: Any, hidden: torch.Tensor | None) -> None:
        super().saw(ids, hidden)
        assert hidden is not None
        self.told.append((list(ids), hidden))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_a_draft_head_is_told_the_state_that_each_id_was_chosen_from(tiny: Tiny, instructions: str, dtype: torch.dtype) -> None:
    model = native_model(tiny()[0], dtype, instructions)
    plain = answered(LlamaEngine(model), PROMPT, greedy())
    head = Head(plain[0], VOCAB, mistaken=(2,))
    told_ids = answered(LlamaEngine(model, always(model, 4, head)), PROMPT, greedy())[0]
    assert told_ids == plain[0]
    weights = model._kept[0]
    seen: list[int] = []
    for ids, hidden in head.told:
        assert hidden.dtype == dtype
        logits = rms_norm(hidden, weights.final_norm, model.config.rms_eps) @ weights.head.T
        chosen = logits.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
        # The product here sums in another order than the step's.
        assert (logits.amax(dim=1) - chosen).max() <= (0.5 if dtype == torch.bfloat16 else 1e-3)
        seen += ids
    assert seen == plain[0][: len(seen)]
    assert len(head.told) > 5


def test_a_step_whose_rows_are_not_those_of_single_steps_gets_no_drafts(tiny: Tiny) -> None:
    folder, _ = tiny()
    plain, drafting = (
        LlamaEngine.load(folder, dtype=torch.float32, context_tokens=CONTEXT, threads=None, step="torch", speculation=kind)
        for kind in ("off", "ngram")
    )
    prompt = [5, 6] * 10
    answer, steps = told(drafting, prompt, greedy())
    assert answer == answered(plain, prompt, greedy())
    assert {step.drafted for step in steps} == {0}


def test_prompt_lookup_is_what_an_engine_loads_with_unless_it_is_off(tiny: Tiny) -> None:
    folder, _ = tiny()
    plain, drafting = (
        LlamaEngine.load(
            folder, dtype=torch.float32, context_tokens=CONTEXT, threads=1, step="native", pin=False, speculation=kind
        )
        for kind in ("off", "ngram")
    )
    prompt = [5, 6] * 10
    answer, steps = told(drafting, prompt, greedy())
    assert answer == answered(plain, prompt, greedy())
    assert sum(step.drafted for step in steps) > 0
    with pytest.raises(EngineError, match="max_tokens"):
        drafting.decode(prompt, FIRST, greedy(0), lambda: False)
