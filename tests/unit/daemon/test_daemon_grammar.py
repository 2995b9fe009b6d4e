"""Grammars, held against vLLM's own backend: the same ids may follow, step by step, and the same requests are taken."""

import json
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decode_daemon.engine.protocol import EngineError
from decode_daemon.grammar import Form, Grammars, GrammarUnsupported
from decode_daemon.grammar.form import choice_ebnf, is_lark
from decode_daemon.grammar.schema import DEEPEST, DEEPEST_TAG, deeper_than, unenforced
from handoff.decode_pb2 import Grammar
from tests.kit.grammar import MODEL_VOCAB, PERSON, ready, write_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM's own making
    from transformers import AutoTokenizer
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams, _exceeds_json_nesting
    from vllm.v1.structured_output.backend_xgrammar import (
        XgrammarBackend,
        XgrammarGrammar,
        has_xgrammar_unsupported_json_features,
        validate_xgrammar_grammar,
    )
    from vllm.v1.structured_output.request import get_structured_output_key
    from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

FIELDS: dict[int, str] = {
    Grammar.JSON_SCHEMA: "json",
    Grammar.REGEX: "regex",
    Grammar.CHOICE: "choice",
    Grammar.EBNF: "grammar",
    Grammar.STRUCTURAL_TAG: "structural_tag",
}
"""vLLM's name of each form; a JSON object has no source."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(here)
    return here


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def oracle(tokenizer: Any) -> XgrammarBackend:
    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=False),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama")),
        speculative_config=None,
    )
    return XgrammarBackend(config, tokenizer, MODEL_VOCAB)


@pytest.fixture
async def grammars(folder: Path) -> Grammars:
    return await ready(folder)


def asked_of_vllm(form: Form) -> StructuredOutputsParams:
    if form.kind == Grammar.JSON_OBJECT:
        return StructuredOutputsParams(json_object=True)
    source = json.loads(form.source) if form.kind == Grammar.CHOICE else form.source
    return StructuredOutputsParams(**{FIELDS[form.kind]: source})


def begun_by_vllm(backend: XgrammarBackend, form: Form, stops: set[int]) -> XgrammarGrammar:
    params = SamplingParams(structured_outputs=asked_of_vllm(form))
    validate_xgrammar_grammar(params)
    kind, source = get_structured_output_key(params.structured_outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a deprecated argument of vLLM's
        return backend.compile_grammar(kind, source, stops)


def masked_by_vllm(grammar: XgrammarGrammar, backend: XgrammarBackend) -> list[bool]:
    """Which ids vLLM lets through, as it applies a bitmask to logits."""
    if grammar.is_terminated():
        return [True] * MODEL_VOCAB
    words = backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(words, 0)
    return [bool(int(words[0, token // 32]) >> (token % 32) & 1) for token in range(MODEL_VOCAB)]


ARITHMETIC = 'root ::= term ("+" term)*  # a comment\nterm ::= [0-9]+ | "(" root ")"'
LARK = 'start: greeting ", " NAME "!"\ngreeting: "hello" | "hi"\nNAME: /[A-Z][a-z]*/'
OLD_TAG = {
    "structures": [{"begin": "<f=a>", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}}, "end": "</f>"}],
    "triggers": ["<f="],
}
NEW_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "yes: "},
            {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "boolean"}}},
        ],
    },
}
FORMS = {
    "schema": Form(Grammar.JSON_SCHEMA, json.dumps(PERSON)),
    "schema of anything": Form(Grammar.JSON_SCHEMA, "{}"),
    "schema with strange whitespace": Form(Grammar.JSON_SCHEMA, ' { "enum" : [ "a", {"b": [1, 2.5]} ] } '),
    "formats": Form(Grammar.JSON_SCHEMA, '{"type": "array", "items": {"type": "string", "format": "date"}}'),
    "object": Form(Grammar.JSON_OBJECT, ""),
    "regex": Form(Grammar.REGEX, r"(yes|no)\s[a-zä]{2,5}\d+"),
    "empty regex": Form(Grammar.REGEX, ""),
    "choice": Form(
        Grammar.CHOICE, json.dumps(["yes", "yes or no", 'a "quoted" \\ one', "two\nlines\r\t\x00\x7f", "日本", "#//"])
    ),
    "ebnf": Form(Grammar.EBNF, ARITHMETIC),
    "lark": Form(Grammar.EBNF, LARK),
    "structural tag of the older form": Form(Grammar.STRUCTURAL_TAG, json.dumps(OLD_TAG)),
    "structural tag": Form(Grammar.STRUCTURAL_TAG, json.dumps(NEW_TAG)),
}


@pytest.mark.parametrize("name", FORMS)
async def test_on_any_walk_the_same_ids_may_follow_as_in_vllm(
    name: str, grammars: Grammars, oracle: XgrammarBackend, tokenizer: Any
) -> None:
    form = FORMS[name]
    await grammars.check(form)
    end, turn = (tokenizer.convert_tokens_to_ids(token) for token in ("<end>", "<turn>"))
    finished = 0
    for seed in range(6):
        draw = random.Random(seed)
        stops = ({end}, {end, turn}, set())[seed % 3]
        ours = await grammars.constraint(form, stops)
        theirs = begun_by_vllm(oracle, form, stops)
        for _ in range(40):
            mask = ours.mask()
            allowed = [True] * MODEL_VOCAB if mask is None else mask.tolist()
            assert allowed == masked_by_vllm(theirs, oracle)
            assert mask is None or (mask.dtype, mask.shape) == (torch.bool, (MODEL_VOCAB,))
            if theirs.is_terminated():
                finished += 1
                break
            may_follow = [token for token, may in enumerate(allowed) if may]
            ending = [token for token in may_follow if token in (end, turn)]
            token = draw.choice(ending if ending and draw.random() < 0.3 else may_follow)
            ours.accept(token)
            assert theirs.accept_tokens("request", [token])
    assert finished, "no walk has come to an end"


REFUSED = {
    "no JSON": (Form(Grammar.JSON_SCHEMA, "{"), "Expecting property name"),
    "no schema at all": (Form(Grammar.JSON_SCHEMA, "  "), "Expecting value"),
    "a schema that nothing matches": (Form(Grammar.JSON_SCHEMA, '{"$ref": "#/nowhere"}'), "Cannot find field nowhere"),
    "a number's multiples": (Form(Grammar.JSON_SCHEMA, '{"items": [{"type": "integer", "multipleOf": 3}]}'), "multipleOf"),
    "an unknown format": (Form(Grammar.JSON_SCHEMA, '{"type": "string", "format": "iri"}'), "format 'iri'"),
    "a format that is no name": (Form(Grammar.JSON_SCHEMA, '{"type": "string", "format": {}}'), "format {}"),
    "a schema nested too deeply": (Form(Grammar.JSON_SCHEMA, '{"items":' * 64 + "{}" + "}" * 64), "at most 64 levels"),
    "a schema nested without end": (Form(Grammar.JSON_SCHEMA, "[" * 100_000), "at most 64 levels"),
    "a regex with lookahead": (Form(Grammar.REGEX, "a(?=b)"), "Lookahead is not supported"),
    "a regex with U+0000": (Form(Grammar.REGEX, "a\x00"), r"U\+0000"),
    "an open bracket": (Form(Grammar.REGEX, "("), "parenthesis is not closed"),
    "no rule": (Form(Grammar.EBNF, 'root ::= "a" | other'), '"other" is not defined'),
    "Lark that is none": (Form(Grammar.EBNF, "start: ("), "xgrammar does not take this grammar"),
    "a tag without triggers": (Form(Grammar.STRUCTURAL_TAG, '{"structures": []}'), "triggers"),
    "a tag that is none": (Form(Grammar.STRUCTURAL_TAG, '{"type": "structural_tag"}'), "xgrammar does not take"),
    "a tag that is no object": (Form(Grammar.STRUCTURAL_TAG, '["structures"]'), "xgrammar does not take"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_vllm_would_not_give_to_xgrammar_is_refused_with_a_sentence(name: str, grammars: Grammars) -> None:
    form, sentence = REFUSED[name]
    with pytest.raises(GrammarUnsupported, match=sentence) as refusal:
        await grammars.check(form)
    assert refusal.value.code == "grammar_unsupported"
    assert "/project/cpp" not in str(refusal.value)
    with pytest.raises((VLLMValidationError, ValueError)):
        validate_xgrammar_grammar(SamplingParams(structured_outputs=asked_of_vllm(form)))


@pytest.mark.parametrize(
    "form",
    [
        Form(Grammar.CHOICE, "[]"),
        Form(Grammar.CHOICE, '["a", 1]'),
        Form(Grammar.CHOICE, '"a"'),
        Form(Grammar.EBNF, " \n"),
        Form(9, ""),
    ],
)
async def test_what_no_gateway_sends_is_refused_too(form: Form, grammars: Grammars) -> None:
    with pytest.raises(GrammarUnsupported):
        await grammars.check(form)


OF_VALUES = ["multipleOf", "format", "pattern", "minLength", "maxLength", "allOf", "anyOf"]
OF_LISTS = ["uniqueItems", "contains", "minContains", "maxContains", "items"]
OF_OBJECTS = ["propertyNames", "patternProperties", "properties", "unevaluatedProperties"]
KEYWORDS = st.sampled_from([*OF_VALUES, *OF_LISTS, *OF_OBJECTS])
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "null"])
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([True, False, None, 3, "date", "uuid", "nonsense", [], {}]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(
            lambda kind, keywords: {"type": kind} | keywords,
            TYPES | st.lists(TYPES | st.none(), max_size=2),
            st.dictionaries(KEYWORDS, inner, max_size=4),
        )
        | st.dictionaries(KEYWORDS, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(SCHEMAS)
def test_the_same_schemas_go_to_xgrammar_as_in_vllm(schema: Any) -> None:
    try:
        theirs = has_xgrammar_unsupported_json_features(schema)
    except TypeError:  # of a format that is no string, which vLLM takes for unsupported too
        theirs = True
    assert (unenforced(schema) is not None) == theirs


@given(st.integers(0, 90), st.integers(0, 90), st.sampled_from([DEEPEST, DEEPEST_TAG]))
def test_json_may_nest_as_deeply_as_in_vllm(objects: int, lists: int, limit: int) -> None:
    value: Any = "leaf"
    for depth in range(objects + lists):
        value = {"a": value, "b": 1} if depth < objects else [value]
    assert deeper_than(limit, value) == _exceeds_json_nesting(value, limit)


@given(st.text(st.sampled_from('ab:=#/ \n\r"\u2028')))
def test_lark_is_told_from_ebnf_as_in_vllm(source: str) -> None:
    assert is_lark(source) == (grammar_is_likely_lark(source) or not source)


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_choices_become_the_grammar_that_vllm_makes_of_them(choices: list[str]) -> None:
    assert choice_ebnf(choices) == choice_as_grammar(choices)


async def test_a_token_that_may_not_come_is_an_error_of_the_engines_kind(grammars: Grammars, tokenizer: Any) -> None:
    constraint = await grammars.constraint(Form(Grammar.CHOICE, '["yes"]'), [])
    (wrong,) = tokenizer.encode("q")
    with pytest.raises(EngineError, match=f"no place for token {wrong}"):
        constraint.accept(wrong)
    with pytest.raises(EngineError):
        constraint.accept(MODEL_VOCAB)


async def test_after_its_end_an_answer_goes_on_unconstrained(grammars: Grammars, tokenizer: Any) -> None:
    end = tokenizer.convert_tokens_to_ids("<end>")
    constraint = await grammars.constraint(Form(Grammar.CHOICE, '["yes"]'), [end])
    for token in tokenizer.encode("yes"):
        assert constraint.mask() is not None
        constraint.accept(token)
    last = constraint.mask()
    assert last is not None
    assert last.nonzero().flatten().tolist() == [end]
    constraint.accept(end)
    assert constraint.mask() is None
    constraint.accept(5)
    assert constraint.mask() is None


async def test_a_mask_is_the_callers_to_keep(grammars: Grammars, tokenizer: Any) -> None:
    constraint = await grammars.constraint(Form(Grammar.CHOICE, '["yes"]'), [])
    first = constraint.mask()
    assert first is not None
    before = first.clone()
    constraint.accept(tokenizer.encode("yes")[0])
    constraint.mask()
    assert torch.equal(first, before)


async def test_ending_ids_that_the_logits_have_no_place_for_are_left_aside(grammars: Grammars, tokenizer: Any) -> None:
    (token,) = tokenizer.encode("7")
    constraint = await grammars.constraint(Form(Grammar.REGEX, "7"), [11, MODEL_VOCAB, 10**9])
    constraint.accept(token)
    mask = constraint.mask()
    assert mask is not None
    assert mask.nonzero().flatten().tolist() == [11]
