"""One request becomes a plan: what the client leaves open is the model's, and limits are those that vLLM has."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.cards import Defaults
from gateway.eligibility import Unsupported
from gateway.endpoints import Endpoint
from tests.kit.fields import CHAT, COMPLETIONS, request
from tests.kit.planned import VOCAB, look_at_limit, outcome, plan_of, the_card
from tests.kit.sampled import vllms_request


def test_defaults_of_the_model_are_taken_where_the_client_says_nothing() -> None:
    own = Defaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1)
    model = replace(the_card(), defaults=own)
    sampling = plan_of({}, model=model).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (
        *(0.6, 0.95, 20),
        *(0.1, 1.1),
    )
    said = plan_of({"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}, model=model)
    assert said == plan_of({})


@pytest.mark.parametrize(
    ("endpoint", "fields", "tokens"),
    [
        (CHAT, {}, None),
        (CHAT, {"max_tokens": None, "max_completion_tokens": None}, None),
        (CHAT, {"max_tokens": 24}, 24),
        (CHAT, {"max_completion_tokens": 24}, 24),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 24}, 24),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 24}, 24),
        (CHAT, {"max_tokens": 24, "max_completion_tokens": None}, 24),
        (COMPLETIONS, {}, 16),
        (COMPLETIONS, {"max_tokens": None}, 16),
        (COMPLETIONS, {"max_tokens": 24}, 24),
        (COMPLETIONS, {"max_completion_tokens": 24}, 16),
    ],
)
def test_the_answer_is_as_long_as_vllms(endpoint: Endpoint, fields: dict[str, Any], tokens: int | None) -> None:
    assert plan_of(fields, endpoint).max_tokens == tokens


def test_the_models_own_limit_counts_where_a_chat_names_none() -> None:
    model = replace(the_card(), defaults=Defaults(max_tokens=99))
    assert plan_of({}, model=model).max_tokens == 99
    assert plan_of({"max_tokens": 500}, model=model).max_tokens == 500
    assert plan_of({}, COMPLETIONS, model=model).max_tokens == 16


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [(CHAT, {"min_tokens": 6, "max_tokens": 5}), (COMPLETIONS, {"min_tokens": 17}), (CHAT, {"min_tokens": 100})],
)
def test_more_tokens_at_least_than_at_most_are_plain_vllms_to_refuse(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    why = outcome(fields, endpoint, model=replace(the_card(), defaults=Defaults(max_tokens=99)))
    assert isinstance(why, Unsupported)
    assert (why.reason, why.param) == ("unsupported_min_tokens", "min_tokens")


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        (CHAT, {"max_tokens": 1}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 1}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 1, "max_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": None, "max_tokens": 1}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 1}, "max_tokens"),
    ],
)
def test_a_limit_that_is_asked_for_beyond_the_context_is_plain_vllms_to_refuse(
    oracle: SimpleNamespace, endpoint: Endpoint, fields: dict[str, Any], param: str
) -> None:
    from vllm.exceptions import VLLMValidationError

    context = the_card().context_tokens
    asked = {key: None if more is None else context + more for key, more in fields.items()}
    why = outcome(asked, endpoint)
    assert isinstance(why, Unsupported)
    assert (why.reason, why.param) == (f"unsupported_{param}", param)
    assert f"{param} is {context + 1}, and the whole context has {context} tokens" in why.detail
    with pytest.raises(VLLMValidationError, match=f"{param}={context + 1}"):
        look_at_limit(vllms_request(oracle, endpoint, request(endpoint, **asked)))
    assert plan_of({param: context}, endpoint).max_tokens == context


def test_limits_beyond_the_context_that_vllm_does_not_look_at_are_cut_down() -> None:
    context = the_card().context_tokens
    assert plan_of({"max_tokens": context + 1, "max_completion_tokens": 5}).max_tokens == 5
    assert plan_of({"max_completion_tokens": context + 1}, COMPLETIONS).max_tokens == 16
    assert plan_of({}, model=replace(the_card(), defaults=Defaults(max_tokens=context + 1))).max_tokens == context + 1


@pytest.mark.parametrize("endpoint", Endpoint)
def test_a_card_without_the_size_of_its_vocabulary_serves_nothing_and_says_why(endpoint: Endpoint) -> None:
    why = outcome({"stop_token_ids": [5]}, endpoint, model=replace(the_card(), vocab_size=0))
    assert isinstance(why, Unsupported)
    assert (why.reason, why.param) == ("no_card", None)
    assert "does not tell the size of the vocabulary" in why.detail
    assert outcome({}, endpoint, model=replace(the_card(), vocab_size=0)) == why


def test_ids_that_are_named_twice_travel_once() -> None:
    sampling = plan_of({"allowed_token_ids": [7, 3, 7, 7], "stop_token_ids": [5, 2, 5]}).sampling
    assert sampling.allowed_token_ids == (7, 3)
    assert sampling.stop_token_ids == (5, 2)


def test_a_models_own_limit_of_nothing_is_plain_vllms_to_refuse() -> None:
    why = outcome({}, model=replace(the_card(), defaults=Defaults(max_tokens=0)))
    assert isinstance(why, Unsupported)
    assert why.reason == "unsupported_min_tokens"


def test_what_must_fit_behind_the_prompt_is_the_shortest_answer_as_vllm_cuts_the_longest_one_down() -> None:
    assert plan_of({"max_tokens": 9, "min_tokens": 3}).least_tokens == 3
    assert plan_of({"max_tokens": 9}).least_tokens == 1
    assert plan_of({}).least_tokens == 1


@pytest.mark.parametrize(
    ("endpoint", "key", "with_id"),
    [
        (CHAT, "stop_token_ids", lambda token: [0, token]),
        (CHAT, "allowed_token_ids", lambda token: [token, 0]),
        (CHAT, "logit_bias", lambda token: {"0": 1, str(token): 1}),
        (COMPLETIONS, "stop_token_ids", lambda token: [token]),
        (COMPLETIONS, "prompt", lambda token: [1, token]),
        (COMPLETIONS, "prompt", lambda token: [[token]]),
    ],
)
def test_token_ids_that_the_model_does_not_have_are_plain_vllms_to_refuse(endpoint: Endpoint, key: str, with_id: Any) -> None:
    plan_of({key: with_id(VOCAB - 1)}, endpoint)
    why = outcome({key: with_id(VOCAB)}, endpoint)
    assert isinstance(why, Unsupported)
    assert (why.reason, why.param) == (f"unsupported_{key}", key)
    assert str(VOCAB) in why.detail


def test_bad_words_travel_as_words_and_as_ids() -> None:
    sampling = plan_of({"bad_words": ["stop", "stop"]}).sampling
    assert sampling.bad_words == ("stop",)
    assert sampling.bad_word_ids
    why = outcome({"bad_words": ["x" * 20_000]})
    assert isinstance(why, Unsupported)
    assert why.reason == "unsupported_bad_words"
