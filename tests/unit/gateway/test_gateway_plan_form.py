"""The form of an answer as it is planned: usage, logprobs, the grammar, and whether vLLM's parsers make it."""

import json
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from decode_daemon.grammar import Form, GrammarUnsupported
from gateway.cards import Defaults
from gateway.eligibility import Unsupported
from gateway.endpoints import Endpoint
from gateway.grammars import Grammar, GrammarKind, grammar_of
from handoff import decode_pb2 as pb
from tests.kit.fields import CHAT, COMPLETIONS, SCHEMA, TOOL, request
from tests.kit.gateway import bpe_tokenizer
from tests.kit.planned import VOCAB, outcome, plan_of
from tests.kit.sampled import vllms_params, vllms_request


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
