"""vLLM's own sampler is the judge: the same logits, parameters and tokens so far give the same, bit for bit.

vLLM's side goes the whole way of a request: its SamplingParams, its batch, its processors, its sampler.
"""

import math
import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from decode_daemon.engine.limits import check_sampling
from decode_daemon.engine.protocol import EngineError, SamplingParams
from decode_daemon.engine.sampling import GREEDY_BELOW, Sampler, distribution, token_logprobs

VOCAB = 60
FEW_IDS = st.integers(0, 11)  # few, so that an answer repeats them and bad words meet it
ANY_ID = st.integers(0, VOCAB - 1)


@dataclass(frozen=True)
class Allow:
    """A constraint in the one state that a step sees."""

    ids: frozenset[int]

    def mask(self) -> torch.Tensor:
        return torch.tensor([token in self.ids for token in range(VOCAB)])

    def accept(self, token: int) -> None:
        """Nothing: the state is given."""


@dataclass(frozen=True)
class Case:
    params: SamplingParams
    prompt: list[int]
    answer: list[int]
    logits: torch.Tensor
    constraint: Allow | None

    def sampler(self) -> Sampler:
        sampler = Sampler(self.params, VOCAB, prompt_ids=self.prompt, constraint=self.constraint)
        sampler.accept(self.answer[:-1])
        sampler.adjusted(torch.zeros(VOCAB), 0)  # a step before the last token: what it counted is counted once
        sampler.accept(self.answer[-1:])
        return sampler

    def model_logits(self) -> torch.Tensor:
        """The logits as vLLM's sampler gets them, [1, vocab] in the model's dtype: the grammar's mask is on them."""
        if self.constraint is None:
            return self.logits.clone().unsqueeze(0)
        return self.logits.masked_fill(~self.constraint.mask(), -math.inf).unsqueeze(0)


def neutral_or(neutral: Any, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(neutral), values)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    answer = draw(st.lists(FEW_IDS, min_size=1, max_size=12))
    endings = st.integers(0, len(answer)).map(lambda start: tuple(answer[start:]))
    bad_words = st.builds(lambda before, last: (*before, last), st.one_of(endings, st.lists(FEW_IDS, max_size=3)), FEW_IDS)
    params = SamplingParams(
        temperature=draw(st.one_of(st.sampled_from([0.0, 0.005]), st.floats(0.01, 2.0))),
        top_p=draw(neutral_or(1.0, st.floats(0.05, 0.98))),
        top_k=draw(neutral_or(0, st.integers(1, VOCAB + 5))),
        min_p=draw(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.001, 1.0))),
        presence_penalty=draw(neutral_or(0.0, st.floats(-2, 2))),
        frequency_penalty=draw(neutral_or(0.0, st.floats(-2, 2))),
        repetition_penalty=draw(neutral_or(1.0, st.floats(0.1, 3))),
        logit_bias=draw(neutral_or({}, st.dictionaries(ANY_ID, st.floats(-100, 100), max_size=5))),
        allowed_token_ids=draw(neutral_or((), st.lists(ANY_ID, min_size=1, max_size=40).map(tuple))),
        bad_words=tuple(draw(st.lists(bad_words, max_size=4))),
        min_tokens=draw(neutral_or(0, st.integers(len(answer) - 1, len(answer) + 1))),
        ending_token_ids=frozenset(draw(st.lists(ANY_ID, max_size=4))),
        logprobs=draw(st.one_of(st.none(), st.integers(0, 9))),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    logits = torch.randn(VOCAB, generator=generator) * draw(st.sampled_from([0.5, 3.0, 20.0]))
    constraint = draw(st.one_of(st.none(), st.builds(Allow, st.frozensets(ANY_ID, min_size=1, max_size=30))))
    return Case(params, draw(st.lists(ANY_ID, min_size=1, max_size=30)), answer, logits, constraint)


@pytest.fixture(scope="module")
def vllm() -> SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm import sampling_params
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
        from vllm.v1.sample.sampler import Sampler as VllmSampler
        from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    return SimpleNamespace(
        params=sampling_params,
        refused=VLLMValidationError,
        processors=BUILTIN_LOGITS_PROCESSORS,
        Processors=LogitsProcessors,
        filtered=apply_top_k_top_p,
        sampler=VllmSampler(),
        Request=CachedRequestState,
        Batch=InputBatch,
    )


def vllm_params(vllm: SimpleNamespace, params: SamplingParams, *, constrained: bool = False) -> Any:
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    return vllm.params.SamplingParams(
        **{name: getattr(params, name) for name in (*names, "min_tokens", "logprobs")},
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=list(params.allowed_token_ids) or None,
        _bad_words_token_ids=[list(sequence) for sequence in params.bad_words],
        stop_token_ids=sorted(params.ending_token_ids),
        max_tokens=1000,
        structured_outputs=vllm.params.StructuredOutputsParams(json_object=True) if constrained else None,
    )


def metadata(vllm: SimpleNamespace, case: Case) -> Any:
    """What vLLM's sampler is told about a batch of this one request."""
    cpu, limits = torch.device("cpu"), SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=1))
    batch = vllm.Batch(
        max_num_reqs=1,
        max_model_len=64,
        max_num_batched_tokens=64,
        device=cpu,
        vocab_size=VOCAB,
        block_sizes=[16],
        max_num_blocks_per_req=[4],
        logitsprocs=vllm.Processors(made(limits, cpu, False) for made in vllm.processors),
    )
    params = vllm_params(vllm, case.params, constrained=case.constraint is not None)
    request = vllm.Request("one", case.prompt, [], params, None, ([],), 0, case.answer)
    batch.add_request(request)
    batch.refresh_metadata()
    return batch.sampling_metadata


def vllm_adjusted(vllm: SimpleNamespace, case: Case, told: Any) -> torch.Tensor:
    adjusted: torch.Tensor = vllm.sampler.apply_logits_processors(case.model_logits().float(), told, False)
    return adjusted


def vllm_probabilities(vllm: SimpleNamespace, adjusted: torch.Tensor, told: Any) -> torch.Tensor:
    """What vLLM draws from, by the steps of its `sample`."""
    logits = vllm.sampler.apply_temperature(adjusted, told.temperature, told.all_random)
    for processor in told.logitsprocs.argmax_invariant:
        logits = processor.apply(logits)
    probabilities: torch.Tensor = vllm.filtered(logits, told.top_k, told.top_p).softmax(dim=-1, dtype=torch.float32)
    return probabilities[0]


def near_the_edge(logits: torch.Tensor, params: SamplingParams) -> bool:
    """Whether a rounding error decides which token is top-p's last: float32 sums, as vLLM's, may then say otherwise."""
    if params.top_p == 1.0:
        return False
    whole = distribution(logits, replace(params, top_p=1.0)).double().sort(descending=True).values
    before = whole.cumsum(0) - whole
    return bool(((before - params.top_p).abs() < 1e-5).any())


PROOF = settings(max_examples=200, derandomize=True, database=None)


@PROOF
@given(case=cases(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_adjusted_logits_are_vllms_bit_for_bit(vllm: SimpleNamespace, case: Case, dtype: torch.dtype) -> None:
    case = replace(case, logits=case.logits.to(dtype))
    wanted = vllm_adjusted(vllm, case, metadata(vllm, case))[0]
    sampler = case.sampler()
    before = case.logits.clone()
    logits = sampler.constrained(case.logits, 0)
    if wanted.max() == -math.inf:
        event("no id is left")
        with pytest.raises(EngineError, match="no id is left"):
            sampler.adjusted(logits, 0)
    else:
        assert torch.equal(sampler.adjusted(logits, 0), wanted)
    assert torch.equal(case.logits, before)


@PROOF
@given(case=cases())
def test_the_probabilities_are_vllms(vllm: SimpleNamespace, case: Case) -> None:
    case = replace(case, params=replace(case.params, temperature=case.params.temperature or 1.0))
    told = metadata(vllm, case)
    adjusted = vllm_adjusted(vllm, case, told)
    assume(adjusted.max() > -math.inf and not near_the_edge(adjusted[0], case.params))
    got = distribution(adjusted[0].clone(), case.params)
    wanted = vllm_probabilities(vllm, adjusted, told)
    assert torch.equal(got > 0, wanted > 0)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)


@PROOF
@given(case=cases(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_greedy_tokens_and_all_logprobs_are_those_of_vllms_sampler(
    vllm: SimpleNamespace, case: Case, dtype: torch.dtype
) -> None:
    """In bfloat16 many logits are equal: their order is vLLM's, too."""
    case = replace(case, logits=case.logits.to(dtype), params=replace(case.params, logprobs=case.params.logprobs or 0))
    told = metadata(vllm, case)
    assume(vllm_adjusted(vllm, case, told).max() > -math.inf)
    with torch.compiler.set_stance("force_eager"):
        answer = vllm.sampler(case.model_logits(), told)
    chosen, *others = answer.logprobs_tensors.logprob_token_ids[0].tolist()
    logprob, *other_logprobs = answer.logprobs_tensors.logprobs[0].tolist()

    sampler = case.sampler()
    got = token_logprobs(sampler.constrained(case.logits, 0), chosen, len(others))
    assert (got.logprob, got.top_ids, got.top_logprobs) == (logprob, tuple(others), tuple(other_logprobs))
    if case.params.temperature < GREEDY_BELOW:
        event("greedy")
        assert sampler.choose(case.logits, 0) == (chosen, got)


BAD = [-math.inf, -1e9, -101.0, -2.1, -2.0, -1.0, -0.1, 0.0, 1e-9, 0.5, 1.0, 1.1, 2.0, 2.1, 5.0, math.inf, math.nan]


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize("value", BAD)
def test_a_number_is_refused_exactly_when_vllm_refuses_it(vllm: SimpleNamespace, name: str, value: Any) -> None:
    assert_same_judgement(vllm, replace(SamplingParams(1.0), **{name: value}))


@pytest.mark.parametrize("name", ["top_k", "min_tokens"])
@pytest.mark.parametrize("value", [-2, -1, 0, 1, 7])
def test_a_count_is_refused_exactly_when_vllm_refuses_it(vllm: SimpleNamespace, name: str, value: Any) -> None:
    assert_same_judgement(vllm, replace(SamplingParams(1.0), **{name: value}))


@pytest.mark.parametrize("ids", [(), (0,), (VOCAB - 1,), (VOCAB,), (-1,), (3, VOCAB + 9)])
def test_ids_are_refused_exactly_when_vllm_refuses_them(vllm: SimpleNamespace, ids: tuple[int, ...]) -> None:
    for params in (
        SamplingParams(1.0, allowed_token_ids=ids),
        SamplingParams(1.0, logit_bias=dict.fromkeys(ids, 1.0)),
        SamplingParams(1.0, min_tokens=1, ending_token_ids=frozenset(ids)),
    ):
        assert_same_judgement(vllm, params)


def assert_same_judgement(vllm: SimpleNamespace, params: SamplingParams) -> None:
    model = SimpleNamespace(max_logprobs=20, is_diffusion=False, get_vocab_size=lambda: VOCAB)
    try:
        vllm_params(vllm, params).verify(model, None, None, None)
    except vllm.refused:
        with pytest.raises(EngineError):
            check_sampling(params, VOCAB)
    else:
        check_sampling(params, VOCAB)
