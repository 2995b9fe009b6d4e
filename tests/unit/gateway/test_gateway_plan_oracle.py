"""Whatever a request says, what is planned are the values that vLLM would have sampled with."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.body import Body
from gateway.cards import Defaults
from gateway.eligibility import why_not
from gateway.endpoints import Endpoint
from gateway.fields import FIELDS
from gateway.plan import Plan, make_plan
from tests.kit.fields import COMPANIONS, VALUES, request
from tests.kit.planned import VOCAB, look_at_limit, plan_of, the_card
from tests.kit.sampled import sampled_alike, vllms_params, vllms_request

NUMBERS = st.one_of(st.integers(-3, 500), st.floats(-3, 3), st.floats(), st.integers())
JUNK = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.just([]), st.just({}), st.lists(st.integers(-1, 500), max_size=3)
)
RANGES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.001, 100),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB + 1).map(str), st.floats(-200, 200), max_size=4),
    "allowed_token_ids": st.lists(st.integers(0, VOCAB + 1), min_size=1, max_size=4),
    "stop_token_ids": st.lists(st.integers(0, VOCAB), max_size=4),
    "bad_words": st.lists(st.text(min_size=1, max_size=4), max_size=3),
    "stop": st.lists(st.text(min_size=1, max_size=4), max_size=4),
    "min_tokens": st.integers(0, 20),
    "max_tokens": st.integers(1, 5000),
    "max_completion_tokens": st.integers(1, 5000),
}


@st.composite
def requests(draw: st.DrawFn, endpoint: Endpoint) -> dict[str, Any]:
    """Many fields, with values that the lane serves for each alone."""
    keys = draw(st.lists(st.sampled_from(sorted(FIELDS[endpoint])), unique=True, max_size=14))
    fields: dict[str, Any] = {}
    for key in keys:
        fields |= COMPANIONS.get(key, {})
    for key in keys:
        served = st.sampled_from(VALUES[endpoint][key][0] or [None])
        fields[key] = draw(st.one_of(served, RANGES.get(key, served), served))
    return request(endpoint) | fields


@st.composite
def odd_requests(draw: st.DrawFn, endpoint: Endpoint) -> dict[str, Any]:
    """One field with any value."""
    key = draw(st.sampled_from(sorted(FIELDS[endpoint])))
    served, others = VALUES[endpoint][key]
    value = draw(st.one_of(st.sampled_from([*served, *others]), NUMBERS, NUMBERS, JUNK, RANGES.get(key, JUNK)))
    return request(endpoint, **COMPANIONS.get(key, {})) | {key: value}


DEFAULTS = st.builds(
    Defaults,
    temperature=st.none() | st.sampled_from([0.0, 0.005, 0.6]),
    top_p=st.none() | st.sampled_from([0.9, 1.0]),
    top_k=st.none() | st.sampled_from([-1, 0, 20]),
    min_p=st.none() | st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.none() | st.sampled_from([1.0, 1.05]),
    presence_penalty=st.none() | st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.none() | st.sampled_from([0.0, -0.5]),
    max_tokens=st.none() | st.sampled_from([1, 2048]),
)


@pytest.mark.parametrize("endpoint", Endpoint)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), defaults=DEFAULTS)
def test_fields_together_are_sampled_as_vllm_samples_them(
    oracle: SimpleNamespace, endpoint: Endpoint, data: st.DataObject, defaults: Defaults
) -> None:
    as_vllm(oracle, endpoint, json.dumps(data.draw(requests(endpoint))), defaults)


@pytest.mark.parametrize("endpoint", Endpoint)
@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_whatever_value_the_lane_admits_vllm_takes(oracle: SimpleNamespace, endpoint: Endpoint, data: st.DataObject) -> None:
    as_vllm(oracle, endpoint, json.dumps(data.draw(odd_requests(endpoint))), Defaults())


def as_vllm(oracle: SimpleNamespace, endpoint: Endpoint, raw: str, defaults: Defaults) -> None:
    """If the lane admits a request, vLLM takes it too, and samples with what is planned."""
    body = Body(raw.encode())
    if why_not(endpoint, body, tools=True) is not None:
        return
    said = json.loads(raw)
    theirs = vllms_request(oracle, endpoint, {key: value for key, value in said.items() if key != "kv_transfer_params"})
    assert vllms_request(oracle, endpoint, said)
    plan = make_plan(endpoint, body, replace(the_card(), defaults=defaults), tools=True)
    if isinstance(plan, Plan):
        look_at_limit(theirs)
        sampled_alike(vllms_params(theirs, endpoint, defaults), plan)
        assert plan.form.return_token_ids is bool(theirs.return_token_ids)
        assert plan.form.tokens_as_ids is bool(theirs.return_tokens_as_token_ids)


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 1e-320, 1e-9, 0.0099, 0.01, 0.7, 1, 2])
@pytest.mark.parametrize("endpoint", Endpoint)
def test_a_small_temperature_is_raised_and_greed_looks_at_nothing_else(
    oracle: SimpleNamespace, endpoint: Endpoint, temperature: float
) -> None:
    fields = {"temperature": temperature, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": -1}
    plan = plan_of(fields, endpoint)
    params = vllms_params(vllms_request(oracle, endpoint, request(endpoint, **fields)), endpoint, Defaults())
    sampled_alike(params, plan)
    assert plan.sampling.seed is None
