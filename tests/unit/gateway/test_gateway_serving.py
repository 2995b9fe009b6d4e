"""What vLLM's connector tells of vLLM's configuration, and which of it makes vLLM's answers other ones than the lane's."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from benchmarks.fakes import SERVING
from gateway.body import Body
from gateway.endpoints import Endpoint
from gateway.grammars import Grammar, GrammarKind
from gateway.plan import Plan, make_plan
from gateway.serving import HandedOver, Serving, Servings, read_handed_over, why_not_exact
from gateway.settings import GatewaySettings
from handoff.prompt import digest, packed
from tests.kit.gateway import SECRET, card, chat, handed_over, prompt_request


def serving(**told: Any) -> Serving:
    return read_handed_over({"kv_transfer_params": handed_over(5, **told)}).serving


def settings(**values: Any) -> GatewaySettings:
    return GatewaySettings.load(secret=SECRET, **values)


def planned(endpoint: Endpoint, defaults: dict[str, Any], fields: dict[str, Any]) -> tuple[Plan, Body]:
    body = Body(json.dumps((chat if endpoint is Endpoint.CHAT else prompt_request)(**fields)).encode())
    plan = make_plan(endpoint, body, card(**defaults))
    assert isinstance(plan, Plan), plan
    return plan, body


def why(
    told: dict[str, Any], *, endpoint: Endpoint = Endpoint.CHAT, defaults: dict[str, Any] | None = None, **fields: Any
) -> str | None:
    """Why the answer to a request with these fields would be another one, of a model with these defaults."""
    own = defaults or {}
    plan, body = planned(endpoint, own, fields)
    return why_not_exact(serving(**told), plan, body, card(**own), settings())


def test_what_the_connector_tells_is_read() -> None:
    read = read_handed_over({"kv_transfer_params": handed_over(5, [1, 2], defaults={"top_k": 20}, future="x")})
    assert read == HandedOver(5, [1, 2], digest(packed([1, 2])), serving(defaults={"top_k": 20}))
    assert read.serving.defaults == {"top_k": 20}


@pytest.mark.parametrize(
    "change",
    [
        {"defaults": None},
        {"defaults": []},
        {"defaults": {"temperature": "hot"}},
        {"defaults": {"temperature": True}},
        {"longest_answer": 0},
        {"longest_answer": "9"},
        {"logprobs_mode": None},
        {"grammar_backend": 5},
        {"compact_json": "no"},
        {"reasoning_parser": None},
        {"watermark": None},
    ],
)
def test_a_configuration_that_is_none_is_no_handoff(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="another version"):
        serving(**change)


@pytest.mark.parametrize("member", SERVING)
def test_a_configuration_with_a_gap_is_no_handoff(member: str) -> None:
    told = handed_over(5)
    del told["anchorleg"]["serving"][member]
    with pytest.raises(ValueError, match=member):
        read_handed_over({"kv_transfer_params": told})


@pytest.mark.parametrize("answer", [None, [], 5, {}, {"kv_transfer_params": None}, {"kv_transfer_params": {"other": 1}}])
def test_an_answer_without_a_claim_taken_names_the_secret(answer: Any) -> None:
    with pytest.raises(ValueError, match="ANCHORLEG_SECRET"):
        read_handed_over(answer)


@pytest.mark.parametrize("endpoint", Endpoint)
def test_a_vllm_that_was_told_nothing_answers_as_the_lane(endpoint: Endpoint) -> None:
    each: list[dict[str, Any]] = [{}, {"temperature": 0}, {"logprobs": True if endpoint is Endpoint.CHAT else 1}]
    for fields in each:
        assert why({}, endpoint=endpoint, **fields) is None
    assert why({}, endpoint=endpoint, response_format={"type": "json_object"}) is None


DEFAULTS: list[tuple[str, float, float]] = [
    ("temperature", 0.5, 1.0),
    ("top_p", 0.5, 1.0),
    ("top_k", 20, 0),
    ("min_p", 0.25, 0.0),
    ("repetition_penalty", 1.5, 1.0),
    ("presence_penalty", 0.5, 0.0),
    ("frequency_penalty", 0.5, 0.0),
]


@pytest.mark.parametrize(("name", "value", "neutral"), DEFAULTS)
@pytest.mark.parametrize("endpoint", Endpoint)
def test_another_default_is_another_answer_where_a_request_leaves_it_open(
    name: str, value: float, neutral: float, endpoint: Endpoint
) -> None:
    assert name in str(why({"defaults": {name: value}}, endpoint=endpoint))
    assert name in str(why({}, endpoint=endpoint, defaults={name: value}))
    left_open: dict[str, Any] = {name: None}
    said: dict[str, Any] = {name: value}
    assert name in str(why({"defaults": {name: value}}, endpoint=endpoint, **left_open))
    assert why({"defaults": {name: value}}, endpoint=endpoint, **said) is None
    assert why({"defaults": {name: value}}, endpoint=endpoint, defaults={name: value}) is None
    assert why({"defaults": {name: neutral}}, endpoint=endpoint) is None
    assert why({}, endpoint=endpoint, defaults={name: neutral}) is None


def test_defaults_that_greedy_sampling_does_not_look_at_are_no_matter() -> None:
    for name in ("top_p", "top_k", "min_p"):
        assert why({"defaults": {name: 0.5 if name != "top_k" else 20}}, temperature=0) is None
    assert why({"defaults": {"presence_penalty": 0.5}}, temperature=0) is not None


def test_minus_one_and_nothing_are_the_same_top_k() -> None:
    assert why({"defaults": {"top_k": -1}}) is None
    assert why({"defaults": {"top_k": -1}}, defaults={"top_k": 0}) is None


def test_a_default_that_is_no_number_equals_none() -> None:
    assert why({"defaults": {"temperature": math.nan}}) is not None


def test_a_default_length_counts_where_the_lane_takes_the_models() -> None:
    assert "max_tokens" in str(why({"defaults": {"max_tokens": 9}}))
    assert "max_tokens" in str(why({}, defaults={"max_tokens": 9}))
    assert why({"defaults": {"max_tokens": 9}}, max_tokens=50) is None
    assert why({"defaults": {"max_tokens": 9}}, defaults={"max_tokens": 9}) is None
    assert why({"defaults": {"max_tokens": 9}}, endpoint=Endpoint.COMPLETIONS) is None


def test_a_limit_on_every_answer_counts_where_a_request_may_go_beyond() -> None:
    told = {"longest_answer": 9, "defaults": {"max_tokens": 9}}
    assert "9 tokens" in str(why(told, max_tokens=10))
    assert "9 tokens" in str(why(told | {"defaults": {}}))
    assert why(told, max_tokens=9) is None
    assert "9 tokens" in str(why(told, endpoint=Endpoint.COMPLETIONS))


def test_logprobs_of_another_kind_count_where_they_are_asked_for() -> None:
    told = {"logprobs_mode": "processed_logprobs"}
    assert why(told) is None
    assert "processed_logprobs" in str(why(told, logprobs=True))
    assert "processed_logprobs" in str(why(told, endpoint=Endpoint.COMPLETIONS, logprobs=0))


GRAMMARS = [
    {"grammar_backend": "guidance"},
    {"grammar_backend": "outlines"},
    {"compact_json": True},
    {"reasoning_parser": "deepseek_r1"},
]


@pytest.mark.parametrize("told", GRAMMARS, ids=str)
def test_other_grammars_count_where_one_is_asked_for(told: dict[str, Any]) -> None:
    assert why(told, endpoint=Endpoint.COMPLETIONS, response_format={"type": "json_object"}) is not None
    assert why(told, endpoint=Endpoint.COMPLETIONS) is None


def test_grammars_of_the_same_library_are_the_same() -> None:
    grammar: dict[str, Any] = {"endpoint": Endpoint.COMPLETIONS, "response_format": {"type": "json_object"}}
    assert why({"grammar_backend": "xgrammar"}, **grammar) is None
    assert why({"reasoning_parser": "deepseek_r1", "grammar_in_reasoning": True}, **grammar) is None


def test_a_grammar_of_which_vllm_says_that_it_begins_with_the_answer_is_no_matter() -> None:
    plan, body = planned(Endpoint.CHAT, {}, {"temperature": 0})
    rendered = replace(plan, parsed=True, grammar=Grammar(GrammarKind.REGEX, ".*"))
    told, meant = serving(reasoning_parser="deepseek_r1"), settings(reasoning="derender")
    assert why_not_exact(told, rendered, body, card(), meant) is None
    assert why_not_exact(told, replace(rendered, parsed=False), body, card(), meant) is not None


def test_a_parser_of_reasoning_that_the_gateway_does_not_know_of_makes_other_chats() -> None:
    told = serving(reasoning_parser="deepseek_r1")
    for endpoint, meant, exact in (
        (Endpoint.CHAT, "none", False),
        (Endpoint.CHAT, "derender", True),
        (Endpoint.COMPLETIONS, "none", True),
    ):
        plan, body = planned(endpoint, {}, {})
        reason = why_not_exact(told, plan, body, card(), settings(reasoning=meant))
        assert (reason is None) is exact, (endpoint, meant)
        assert exact or "--reasoning" in str(reason)


def test_a_watermark_is_in_every_answer() -> None:
    assert "watermark" in str(why({"watermark": True}, temperature=0))


class TestServings:
    PLAN, BODY = planned(Endpoint.CHAT, {}, {})
    OTHERWISE = serving(defaults={"temperature": 0.5})

    def test_what_was_told_is_remembered_for_a_minute(self) -> None:
        now = 100.0
        servings = Servings(settings(), lambda: now)
        assert servings.why_not(self.PLAN, self.BODY, card()) is None
        assert servings.judge(self.OTHERWISE, self.PLAN, self.BODY, card()) is not None
        for moment, known in ((100.0, True), (159.9, True), (160.0, False)):
            now = moment
            assert (servings.why_not(self.PLAN, self.BODY, card()) is not None) is known

    def test_a_vllm_that_was_restarted_as_it_should_be_is_known_at_once(self) -> None:
        servings = Servings(settings())
        servings.judge(self.OTHERWISE, self.PLAN, self.BODY, card())
        assert servings.judge(serving(), self.PLAN, self.BODY, card()) is None
        assert servings.why_not(self.PLAN, self.BODY, card()) is None

    def test_one_models_vllm_is_not_anothers(self) -> None:
        servings = Servings(settings())
        servings.judge(self.OTHERWISE, self.PLAN, self.BODY, card())
        other, body = planned(Endpoint.CHAT, {}, {"model": "another"})
        assert servings.why_not(other, body, card()) is None

    def test_an_operator_reads_each_reason_once(self) -> None:
        servings = Servings(settings())
        with capture_logs() as logged:
            for _ in range(3):
                servings.judge(self.OTHERWISE, self.PLAN, self.BODY, card())
                servings.judge(serving(watermark=True), self.PLAN, self.BODY, card())
                servings.judge(serving(), self.PLAN, self.BODY, card())
        assert [entry["log_level"] for entry in logged] == ["error", "error"]
        assert "temperature" in logged[0]["why"]
        assert "watermark" in logged[1]["why"]
