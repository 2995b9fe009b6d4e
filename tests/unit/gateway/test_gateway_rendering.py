"""vLLM's render endpoint: what is asked, what is read out of its answer, and what the lane leaves to vLLM."""

import json
from typing import Any

import pytest

from gateway.body import Body
from gateway.eligibility import Unsupported
from gateway.endpoints import Endpoint
from gateway.grammars import Grammar, GrammarKind
from gateway.plan import Form, Plan, Sampling
from gateway.rendering import RENDER_PATH, Rendered, ToolChoice, chat_request, make_parsing, render, tool_choice
from gateway.upstream import Upstream, UpstreamUnavailable
from tests.kit.gateway import CREDENTIALS, MODEL, body, card, end_id
from tests.kit.legs import ScriptedVllm, answers, breaks, hangs

TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "f"}}
DISABLED = {
    "error": {
        "message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
        "type": "PermissionDeniedError",
        "param": None,
        "code": 403,
    }
}
NO_MODEL = {"error": {"message": "The model `x` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}}
UNSET = {
    "json": None,
    "regex": None,
    "choice": None,
    "grammar": None,
    "json_object": None,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
    "_backend": None,
    "_backend_was_auto": False,
}
"""A constraint as vLLM 0.32 writes it into its answer."""


def rendered(*, structured: dict[str, Any] | None = None, sampling: dict[str, Any] | None = None, **over: Any) -> Any:
    """An answer of vLLM's, in its own form: what is at its default is left out of the sampling parameters."""
    params = {"temperature": 0.0, "stop": [], "stop_token_ids": [], "max_tokens": 40, "output_kind": 2, **(sampling or {})}
    if structured is not None:
        params["structured_outputs"] = UNSET | structured
    return {
        "request_id": "chatcmpl-1",
        "token_ids": [1, 2, 3],
        "features": None,
        "sampling_params": params,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        **over,
    }


async def asked(vllm: ScriptedVllm, request: Body, *, timeout_s: float = 5) -> Rendered | Unsupported:
    async with Upstream(vllm.url, token_timeout_s=5, tokenize_timeout_s=5, generation_timeout_s=5) as upstream:
        return await render(upstream.post, request, CREDENTIALS, timeout_s)


async def told(vllm: ScriptedVllm, answer: Any) -> Rendered | Unsupported:
    vllm.answers[RENDER_PATH] = answers(answer)
    return await asked(vllm, body())


async def test_vllm_gets_the_clients_own_bytes_without_what_only_concerns_their_transport(vllm: ScriptedVllm) -> None:
    vllm.answers[RENDER_PATH] = answers(rendered())
    messages = '"messages" : [ {"role":"user","content":"\\u00e9 1.0"} ]'
    others = f'"model":"{MODEL}", "stream":true, "stream_options":{{}}, "seed":null, "kv_transfer_params":{{}}'
    request = Body(f"{{{messages}, {others}}}".encode())
    assert await asked(vllm, request) == Rendered((1, 2, 3), None, (), skip_special_tokens=True, reasons=False)
    (sent,) = vllm.asked
    assert messages.encode() in sent.body
    assert sorted(sent.json()) == ["messages", "model", "seed"]
    assert sent.headers["authorization"] == "Bearer client"


@pytest.mark.parametrize(
    ("structured", "grammar"),
    [
        ({"json": {"type": "object", "a": [1, 2.5]}}, Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "a": [1, 2.5]}')),
        ({"json": '{"type":"object"}'}, Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
        ({"json_object": True}, Grammar(GrammarKind.JSON_OBJECT)),
        ({"regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"choice": ["a", "b"]}, Grammar(GrammarKind.CHOICE, '["a", "b"]')),
        ({"grammar": 'root ::= "a"'}, Grammar(GrammarKind.EBNF, 'root ::= "a"')),
        ({"structural_tag": '{"type": "structural_tag"}'}, Grammar(GrammarKind.STRUCTURAL_TAG, '{"type": "structural_tag"}')),
    ],
)
async def test_every_kind_of_constraint_becomes_the_decode_legs_grammar(
    vllm: ScriptedVllm, structured: dict[str, Any], grammar: Grammar
) -> None:
    outcome = await told(vllm, rendered(structured=structured))
    assert isinstance(outcome, Rendered)
    assert outcome.grammar == grammar


async def test_what_a_parser_adds_to_the_sampling_is_told(vllm: ScriptedVllm) -> None:
    sampling = {"stop_token_ids": [7, 8], "skip_special_tokens": False}
    outcome = await told(vllm, rendered(sampling=sampling, reasoning_parser_kwargs={"chat_template_kwargs": {}}))
    assert outcome == Rendered((1, 2, 3), None, (7, 8), skip_special_tokens=False, reasons=True)


REASONS: dict[str, Any] = {"reasoning_parser_kwargs": {"chat_template_kwargs": {}}}


@pytest.mark.parametrize("ended", [False, None])
async def test_a_grammar_that_waits_for_the_end_of_the_reasoning_is_vllms(vllm: ScriptedVllm, ended: bool | None) -> None:
    outcome = await told(vllm, rendered(structured={"regex": "a"}, reasoning_ended=ended, **REASONS))
    assert isinstance(outcome, Unsupported)
    assert (outcome.reason, outcome.param) == ("unsupported_structured_outputs", "structured_outputs")


@pytest.mark.parametrize("over", [{"reasoning_ended": True, **REASONS}, {"reasoning_ended": None}])
async def test_a_grammar_that_begins_with_the_answer_is_served(vllm: ScriptedVllm, over: dict[str, Any]) -> None:
    outcome = await told(vllm, rendered(structured={"regex": "a"}, **over))
    assert isinstance(outcome, Rendered)
    assert outcome.grammar == Grammar(GrammarKind.REGEX, "a")


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (rendered(sampling={"stop": ["</tool>"]}), "stop"),
        (rendered(sampling={"thinking_token_budget": 9}), "thinking_token_budget"),
        (rendered(features={"mm_hashes": {}}), "messages"),
        (rendered(structured={"json_object": True, "disable_any_whitespace": True}), "structured_outputs"),
        (rendered(structured={"json": {}, "whitespace_pattern": " "}), "structured_outputs"),
        (rendered(structured={"json": {}, "disable_additional_properties": True}), "structured_outputs"),
        (rendered(structured={"a_new_kind": "a"}), "structured_outputs"),
        (rendered(structured={}), "structured_outputs"),
    ],
)
async def test_what_the_lane_cannot_do_exactly_is_vllms_and_the_field_is_named(
    vllm: ScriptedVllm, answer: Any, field: str
) -> None:
    outcome = await told(vllm, answer)
    assert isinstance(outcome, Unsupported)
    assert (outcome.reason, outcome.param) == (f"unsupported_{field}", field)


@pytest.mark.parametrize(("answer", "status"), [(DISABLED, 403), ({"detail": "Not Found"}, 404)])
async def test_a_vllm_without_the_endpoint_is_told_which_flag_is_missing(vllm: ScriptedVllm, answer: Any, status: int) -> None:
    vllm.answers[RENDER_PATH] = answers(answer, status)
    outcome = await asked(vllm, body())
    assert isinstance(outcome, Unsupported)
    assert outcome.reason == "derender_unavailable"
    assert "--enable-scale-out" in outcome.detail


@pytest.mark.parametrize(
    ("answer", "status"), [({"error": {}}, 400), (NO_MODEL, 404), ({"error": "Unauthorized"}, 401), ({"error": {}}, 403)]
)
async def test_what_vllm_refuses_it_may_say_itself(vllm: ScriptedVllm, answer: Any, status: int) -> None:
    vllm.answers[RENDER_PATH] = answers(answer, status)
    outcome = await asked(vllm, body())
    assert isinstance(outcome, Unsupported)
    assert outcome.reason == "refused_by_vllm"


@pytest.mark.parametrize(
    "handler",
    [
        answers({"error": {}}, 500),
        answers(b"<html>"),
        answers(b"[" * 9000),
        answers({}),
        answers(rendered(token_ids=[])),
        answers(rendered(token_ids=[-1])),
        answers(rendered(token_ids=["1"])),
        answers(rendered(sampling={"stop_token_ids": [2**32]})),
        answers(rendered(reasoning_ended="no")),
        hangs,
        breaks,
    ],
)
async def test_no_usable_answer_is_told_apart_from_a_refusal(vllm: ScriptedVllm, handler: Any) -> None:
    vllm.answers[RENDER_PATH] = handler
    with pytest.raises(UpstreamUnavailable, match=RENDER_PATH):
        await asked(vllm, body(), timeout_s=0.3)


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, ToolChoice.NONE),
        ({"tools": []}, ToolChoice.NONE),
        ({"tools": [TOOL]}, ToolChoice.AUTO),
        ({"tools": [TOOL], "tool_choice": "auto"}, ToolChoice.AUTO),
        ({"tools": [TOOL], "tool_choice": "none"}, ToolChoice.NONE),
        ({"tools": [TOOL], "tool_choice": "required"}, ToolChoice.REQUIRED),
        ({"tools": [TOOL], "tool_choice": NAMED}, ToolChoice.NAMED),
    ],
)
def test_tool_choice_has_vllms_default(fields: dict[str, Any], choice: ToolChoice) -> None:
    assert tool_choice(body(**fields)) is choice


@pytest.mark.parametrize("skips", [True, False])
def test_special_tokens_are_unseen_where_vllm_skips_them_before_it_parses(skips: bool) -> None:
    request = body(parallel_tool_calls=False, include_reasoning=False, tools=[TOOL])
    plan = Plan(Endpoint.CHAT, MODEL, Sampling(0.0), Form(), 9)
    parsing = make_parsing(request, plan, card(), Rendered((1, 2), None, (), skip_special_tokens=skips, reasons=True))
    assert parsing.unseen == (frozenset({end_id()}) if skips else frozenset())
    assert parsing.markers == frozenset({end_id()})
    assert (parsing.one_call, parsing.hidden, parsing.choice) == (True, True, ToolChoice.AUTO)
    assert parsing.chat == chat_request(request)
    assert json.loads(parsing.chat)["tools"] == [TOOL]
