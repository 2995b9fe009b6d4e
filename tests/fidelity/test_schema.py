"""Requests made up from vLLM's own OpenAPI schema: the lane fails where vLLM fails, and in the same words."""

import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fidelity.answer import Answer, read
from tests.fidelity.case import CAPITAL, MODEL, STORY, Path
from tests.fidelity.stacks import Running

pytestmark = [pytest.mark.timeout(600)]

EXAMPLES = 25
LATENCY = {"x-slo-class": "latency", "x-slo-max-wait-ms": "20000"}
_PROMPTS: dict[Path, dict[str, Any]] = {
    Path.CHAT: {"messages": [{"role": "user", "content": CAPITAL}]},
    Path.COMPLETIONS: {"prompt": STORY},
}
_FEW = {"max_tokens": 2, "max_completion_tokens": 2, "n": 2, "min_tokens": 2, "thinking_token_budget": 2}


@pytest.mark.parametrize("path", Path)
def test_what_the_schema_allows_fails_in_the_lane_only_as_it_fails_at_vllm(running: Running, path: Path) -> None:
    base_url = running.base_url.removesuffix("/v1")
    operation = schemathesis.openapi.from_url(f"{base_url}/openapi.json")[path]["POST"]

    with httpx.Client(base_url=base_url, timeout=120) as client:

        @settings(
            max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.as_strategy(), prompted=st.sampled_from([True, True, True, False]))
        def holds(case: Any, prompted: bool) -> None:
            content = json.dumps(small(case.body, _PROMPTS[path] if prompted else {})).encode()
            check(_ask(client, path, content, {}), _ask(client, path, content, LATENCY), content)

        holds()


def small(body: Any, prompt: dict[str, Any]) -> Any:
    """Return the body with `prompt`, asking for few tokens of the model that is there.

    The schema allows too many prompts of which vLLM says at once that they are none: the other fields would never be looked at.
    """
    if not isinstance(body, dict):
        return body
    less = {key: min(body[key], most) for key, most in _FEW.items() if type(body.get(key)) is int}
    few = {"max_tokens": 2} if body.get("max_tokens") is None else {}
    # vLLM divides by zero where a beam's penalty is extreme, and ends the connection: the next request may find it closed.
    mild = {"length_penalty": 1.0} if body.get("use_beam_search") else {}
    return {**body, **less, **few, **mild, **prompt, "model": MODEL}


def check(plain: Answer, lane: Answer, content: bytes) -> None:
    """Hold one answer against the other."""
    if plain.status >= 500:
        return  # where vLLM itself fails, it may fail otherwise a second time
    assert lane.status < 500, (content, lane)
    assert (lane.status >= 400) == (plain.status >= 400), (content, plain, lane)
    if plain.status >= 400:
        assert (lane.status, lane.raw) == (plain.status, plain.raw), content
    if lane.status >= 400 and lane.raw != plain.raw:
        assert set(lane.value["error"]) == {"message", "type", "param", "code"}, content
    assert not lane.faults or plain.faults, (content, lane.faults)


def _ask(client: httpx.Client, path: str, content: bytes, headers: dict[str, str]) -> Answer:
    return read(client.post(path, content=content, headers={"content-type": "application/json", **headers}))
