"""One request becomes a plan: the values that both legs get are those that vLLM would have sampled with."""

import json
import warnings
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_daemon.grammar import Form, GrammarUnsupported
from gateway.body import Body
from gateway.cards import Card, Defaults
from gateway.eligibility import Unsupported, why_not
from gateway.endpoints import Endpoint
from gateway.fields import FIELDS
from gateway.grammars import Grammar, GrammarKind, grammar_of
from gateway.plan import Plan, make_plan
from handoff import decode_pb2 as pb
from tests.kit.fields import CHAT, COMPANIONS, COMPLETIONS, SCHEMA, TOOL, VALUES, request
from tests.kit.gateway import bpe_tokenizer, card
from tests.kit.sampled import sampled_alike, vllms_params, vllms_request

VOCAB = bpe_tokenizer().get_vocab_size()


@cache
def the_card() -> Card:
    return card()


def plan_of(fields: dict[str, Any], endpoint: Endpoint = CHAT, **options: Any) -> Plan:
    plan = outcome(fields, endpoint, **options)
    assert isinstance(plan, Plan), plan
    return plan


def outcome(
    fields: dict[str, Any],
    endpoint: Endpoint = CHAT,
    *,
    model: Card | None = None,
    tools: bool = False,
    reasoning: bool = False,
) -> Plan | Unsupported:
    body = Body(json.dumps(request(endpoint, **fields)).encode())
    assert why_not(endpoint, body, tools=tools, reasoning=reasoning) is None
    return make_plan(endpoint, body, model or the_card(), tools=tools, reasoning=reasoning)


# --- as vLLM ---

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


def look_at_limit(theirs: Any) -> None:
    """What vLLM does before it tokenizes; raises where the limit that is asked for is none in the card's context."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.build_tok_params(SimpleNamespace(max_model_len=the_card().context_tokens))


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


# --- what is resolved ---


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


# --- the answer's form ---


@pytest.mark.parametrize(
    ("options", "usage", "continuous"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_usage": None, "continuous_usage_stats": None}, False, False),
    ],
)
def test_usage_is_told_where_vllm_tells_it(options: Any, usage: bool, continuous: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.generate.base.protocol import StreamOptions
        from vllm.entrypoints.serve.utils.api_utils import should_include_usage

    form = plan_of({"stream": True, "stream_options": options}).form
    assert (form.include_usage, form.continuous_usage) == (usage, continuous)
    theirs = None if options is None else StreamOptions.model_validate(options)
    assert should_include_usage(theirs, False) == (usage, continuous)


@pytest.mark.parametrize(
    ("endpoint", "fields", "logprobs"),
    [
        (CHAT, {}, None),
        (CHAT, {"logprobs": False}, None),
        (CHAT, {"logprobs": True}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": None}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, 20),
        (COMPLETIONS, {}, None),
        (COMPLETIONS, {"logprobs": 0}, 0),
        (COMPLETIONS, {"logprobs": 5}, 5),
    ],
)
def test_zero_alternatives_are_logprobs_too(endpoint: Endpoint, fields: dict[str, Any], logprobs: int | None) -> None:
    assert plan_of(fields, endpoint).sampling.logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(GrammarKind.JSON_OBJECT)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        ),
        ({"structured_outputs": {"json": ' {"type": "object"}'}}, Grammar(GrammarKind.JSON_SCHEMA, ' {"type": "object"}')),
        ({"structured_outputs": {"choice": ["é", "b"]}}, Grammar(GrammarKind.CHOICE, '["\\u00e9", "b"]')),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, Grammar(GrammarKind.REGEX, "a+")),
        ({"structured_outputs": {"grammar": "root ::= 'a'"}}, Grammar(GrammarKind.EBNF, "root ::= 'a'")),
    ],
)
def test_a_constraint_is_one_grammar_whichever_field_names_it(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert plan_of(fields).grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}, "response_format"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA}, "response_format": {"type": "text"}}, "structured_outputs"),
    ],
)
def test_a_grammar_knows_the_field_that_it_comes_from(fields: dict[str, Any], param: str) -> None:
    grammar = plan_of(fields).grammar
    assert grammar is not None
    assert grammar.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json": {"maximum": float("nan")}}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"maximum": float("nan")}}}},
            "response_format",
        ),
    ],
)
def test_a_schema_with_numbers_that_json_does_not_know_is_plain_vllms(fields: dict[str, Any], param: str) -> None:
    why = outcome(fields)
    assert isinstance(why, Unsupported)
    assert (why.reason, why.param) == (f"unsupported_{param}", param)
    assert why.detail == "the grammar has numbers that JSON does not know"


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"properties": schema}
    return schema


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(65)}}},
        {"response_format": {"type": "structural_tag", "format": nested(80)}},
        {"structured_outputs": {"json": nested(65)}},
        {"structured_outputs": {"json": json.dumps(nested(65))}},
        {"structured_outputs": {"structural_tag": json.dumps(nested(81))}},
    ],
)
def test_a_grammar_that_nests_deeper_than_vllm_takes_is_the_daemons_to_refuse(
    oracle: SimpleNamespace, fields: dict[str, Any]
) -> None:
    from vllm.exceptions import VLLMValidationError

    grammar = plan_of(fields).grammar
    assert grammar is not None
    with pytest.raises(GrammarUnsupported, match="nest at most"):
        Form(pb.Grammar.Kind.Value(grammar.kind), grammar.source).parse()
    model = SimpleNamespace(max_logprobs=20, get_vocab_size=lambda: VOCAB, is_diffusion=False)
    with pytest.raises(VLLMValidationError, match="nested too deeply"):
        vllms_params(vllms_request(oracle, CHAT, request(CHAT, **fields)), CHAT, Defaults()).verify(
            model, None, SimpleNamespace(backend="auto"), bpe_tokenizer()
        )


def test_a_schema_that_nests_too_deeply_to_be_written_is_plain_vllms() -> None:
    with pytest.raises(ValueError, match="nests without end"):
        grammar_of(None, {"json": nested(100_000)})


@pytest.mark.parametrize(
    ("fields", "parsers", "parsed"),
    [
        ({}, {"tools": True}, False),
        ({}, {"tools": True, "reasoning": True}, True),
        ({"tools": [TOOL]}, {"tools": True}, True),
        ({"tools": [TOOL], "tool_choice": "auto"}, {"tools": True}, True),
        ({"tools": [TOOL], "tool_choice": "none"}, {"tools": True}, False),
        ({"tools": [TOOL], "tool_choice": "none"}, {"reasoning": True}, True),
    ],
)
def test_vllms_parsers_make_the_answer_of_a_chat_with_tools_or_reasoning(
    fields: dict[str, Any], parsers: dict[str, Any], parsed: bool
) -> None:
    assert plan_of(fields, **parsers).parsed is parsed
    assert plan_of({}, COMPLETIONS, **parsers).parsed is False
