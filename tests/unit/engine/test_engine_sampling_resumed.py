"""An answer that another engine began goes on exactly as it would have: nothing hides in the engine that began it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.protocol import Constraint, DecodeParams, EngineError, FinishReason, SamplingParams, Step

VOCAB = 97
PROMPT = [5, 90, 3, 41, 90]
FIRST = 7
LENGTH = 24

GREEDY = SamplingParams(0.0)
SEEDED = SamplingParams(1.0, top_k=40, top_p=0.97, min_p=0.001, seed=99)
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}


class Residues:
    """Each id is one more than the one before it, modulo 3; an answer may begin with any."""

    def __init__(self) -> None:
        self.last: int | None = None

    def mask(self) -> torch.Tensor | None:
        return None if self.last is None else torch.arange(VOCAB) % 3 == (self.last + 1) % 3

    def accept(self, token: int) -> None:
        mask = self.mask()
        if mask is not None and not mask[token]:
            raise EngineError(f"token {token} may not follow {self.last}")
        self.last = token


@pytest.fixture
def engine(tiny_engine: LlamaEngine) -> LlamaEngine:
    """With the prompt's KV in place; what an answer adds to it stays there, as if it had landed for the next one."""
    generator = torch.Generator().manual_seed(1)
    for cache in tiny_engine.kv_target(len(PROMPT)):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return tiny_engine


def decoded(
    engine: LlamaEngine,
    sampling: SamplingParams,
    answer: list[int],
    *,
    counted: bool = True,
    constraint: Constraint | None = None,
    stop: frozenset[int] = frozenset(),
) -> list[Step]:
    """Continue `answer`, all of it known to be one if `counted`, until it has LENGTH tokens."""
    *before, first = answer
    params = DecodeParams(sampling, LENGTH - len(before), stop, constraint, answered=len(before) if counted else 0)
    return list(engine.decode(PROMPT + before, first, params, lambda: False))


def ids(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.ids]


def demanding(engine: LlamaEngine, sampling: SamplingParams, **fields: object) -> SamplingParams:
    """`sampling` and `fields`, with bad words and ending ids that the answer would have met without them."""
    free = ids(decoded(engine, sampling, [FIRST]))
    return replace(
        sampling,
        bad_words=(tuple(free[2:4]), tuple(free[6:9]), (free[11],)),
        ending_token_ids=frozenset({free[4], free[9]}),
        min_tokens=17,
        logprobs=3,
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
@pytest.mark.parametrize("make_constraint", [lambda: None, Residues])
@pytest.mark.parametrize("fields", [{}, PENALTIES])
def test_a_resumed_answer_is_the_tail_of_the_whole_one(
    engine: LlamaEngine,
    sampling: SamplingParams,
    make_constraint: Callable[[], Constraint | None],
    fields: dict[str, float],
) -> None:
    wanted = demanding(engine, sampling, **fields)
    whole = decoded(engine, wanted, [FIRST], constraint=make_constraint())
    answer = [FIRST, *ids(whole)]
    assert len(answer) == LENGTH
    assert answer[1:] != ids(decoded(engine, sampling, [FIRST]))
    for cut in range(1, LENGTH - 1):
        assert decoded(engine, wanted, answer[: cut + 1], constraint=make_constraint()) == whole[cut:]


def test_an_answer_taken_for_a_prompt_goes_on_otherwise(engine: LlamaEngine) -> None:
    """The control: what makes resuming exact is that the ids count as the answer's own."""
    wanted = replace(GREEDY, presence_penalty=2.0, frequency_penalty=2.0)
    whole = decoded(engine, wanted, [FIRST])
    answer = [FIRST, *ids(whole)]
    assert any(decoded(engine, wanted, answer[: cut + 1], counted=False) != whole[cut:] for cut in range(1, LENGTH - 1))


def test_min_tokens_counts_the_tokens_answered_before(engine: LlamaEngine) -> None:
    free = [FIRST, *ids(decoded(engine, GREEDY, [FIRST]))]
    ending = free[9]
    begun = free.index(ending)  # so many tokens come before it
    stop = frozenset({ending})
    for min_tokens, stops in ((begun, True), (begun + 1, False)):
        wanted = SamplingParams(0.0, min_tokens=min_tokens, ending_token_ids=stop)
        (last, *_) = decoded(engine, wanted, free[:begun], stop=stop)
        assert (last.ids == (ending,)) is stops
        assert (last.finish is FinishReason.STOP) is stops


def test_the_constraint_is_fed_the_answered_ids_then_the_first_token(engine: LlamaEngine) -> None:
    constraint = Residues()
    assert all(step.ids[0] % 3 == (n + 2) % 3 for n, step in enumerate(decoded(engine, GREEDY, [3, 4], constraint=constraint)))
    with pytest.raises(EngineError, match="token 6 may not follow 4"):
        decoded(engine, GREEDY, [3, 4, 6], constraint=Residues())
    with pytest.raises(EngineError, match="token 9 may not follow 9"):
        decoded(engine, GREEDY, [9, 9, 7], constraint=Residues())


def test_a_constraint_is_not_asked_about_an_answer_that_has_ended(engine: LlamaEngine) -> None:
    assert decoded(engine, GREEDY, [3, 3], constraint=Residues(), stop=frozenset({3})) == [Step((), FinishReason.STOP)]
