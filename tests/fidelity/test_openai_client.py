"""The `openai` package's own client against the lane: its typed objects, its streams and its helpers, sync and async."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.fidelity.case import CAPITAL, MODEL, STORY
from tests.fidelity.stacks import Running

pytestmark = pytest.mark.timeout(600)
on_the_stacks_loop = pytest.mark.asyncio(loop_scope="session")

LATENCY = {"x-slo-class": "latency", "x-slo-max-wait-ms": "20000"}
ASKED: Any = [{"role": "user", "content": CAPITAL}]
PARIS = "The capital of France is Paris."


class Capital(BaseModel):
    city: Literal["London", "Paris"]
    country: Literal["France"]


@pytest.fixture
def client(running: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=running.base_url, api_key="any", default_headers=LATENCY, max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def plain(running: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=running.base_url, api_key="any", max_retries=0, timeout=120) as client:
        yield client


def test_a_chat_completion_is_the_one_that_plain_vllm_gives(client: OpenAI, plain: OpenAI) -> None:
    def ask(of: OpenAI) -> dict[str, Any]:
        answer = of.chat.completions.create(model=MODEL, messages=ASKED, temperature=0, max_completion_tokens=12)
        return answer.model_dump(exclude={"id", "created"})

    assert ask(client) == ask(plain)


def test_a_raw_response_says_which_lane_it_was_and_parses(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=ASKED, temperature=0, max_tokens=12)
    assert raw.headers["x-slo-lane"] == "latency"
    answer = raw.parse()
    assert answer.choices[0].message.content == PARIS
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_completion_has_its_text_and_logprobs(client: OpenAI, plain: OpenAI) -> None:
    answers = [
        of.completions.create(model=MODEL, prompt=STORY, temperature=0, max_tokens=6, logprobs=2) for of in (client, plain)
    ]
    lane, other = (answer.choices[0] for answer in answers)
    assert (lane.text, lane.finish_reason) == (other.text, "length")
    assert lane.logprobs is not None
    assert other.logprobs is not None
    assert (lane.logprobs.tokens, lane.logprobs.text_offset) == (other.logprobs.tokens, other.logprobs.text_offset)
    assert lane.logprobs.token_logprobs == pytest.approx(other.logprobs.token_logprobs, abs=2e-3)


def test_logprobs_of_a_chat_are_typed(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASKED, temperature=0, max_tokens=3, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["The", " capital", " of"]
    assert all(len(entry.top_logprobs) == 2 and entry.bytes == list(entry.token.encode()) for entry in logprobs.content)


def test_a_stream_is_chunks_with_one_end_and_usage_last(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=ASKED, temperature=0, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PARIS
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


def test_a_stream_of_a_completion_is_its_text(client: OpenAI, plain: OpenAI) -> None:
    texts = [
        "".join(
            chunk.choices[0].text
            for chunk in of.completions.create(model=MODEL, prompt=STORY, temperature=0, max_tokens=8, stream=True)
        )
        for of in (client, plain)
    ]
    assert texts[0] == texts[1] != ""


def test_the_stream_helper_accumulates_the_answer(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASKED, temperature=0, max_tokens=12) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == PARIS


def test_the_parse_helper_gives_an_object_of_the_clients_own_class(client: OpenAI, plain: OpenAI) -> None:
    answers = [
        of.chat.completions.parse(model=MODEL, messages=ASKED, temperature=0, max_tokens=60, response_format=Capital)
        for of in (client, plain)
    ]
    parsed = [answer.choices[0].message.parsed for answer in answers]
    assert parsed[0] == parsed[1]
    assert isinstance(parsed[0], Capital)


def test_the_stream_helper_parses_structured_output(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASKED, temperature=0, max_tokens=60, response_format=Capital
    ) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Capital)


def test_a_streaming_response_can_be_read_line_by_line(client: OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=ASKED, temperature=0, max_tokens=4, stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]
        assert response.headers["x-slo-lane"] == "latency"
    assert lines[-1] == "data: [DONE]"


def test_errors_are_the_clients_own_exceptions(client: OpenAI, plain: OpenAI) -> None:
    said = []
    for of in (client, plain):
        with pytest.raises(openai.BadRequestError) as refused:
            of.chat.completions.create(model=MODEL, messages=ASKED, temperature=3)
        with pytest.raises(openai.NotFoundError) as unknown:
            of.chat.completions.create(model="no-such-model", messages=ASKED, stream=True)
        said.append((refused.value.param, refused.value.body, unknown.value.body))
    assert said[0] == said[1]


def test_a_client_that_forbids_plain_vllm_is_told_the_field(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=ASKED, n=2, extra_headers={"x-slo-fallback": "deny"})
    assert refused.value.param == "n"


@on_the_stacks_loop
async def test_the_async_client_has_answers_at_the_same_time(running: Running) -> None:
    async with AsyncOpenAI(base_url=running.base_url, api_key="any", default_headers=LATENCY, max_retries=0) as client:

        async def whole() -> str | None:
            answer = await client.chat.completions.create(model=MODEL, messages=ASKED, temperature=0, max_tokens=12)
            return answer.choices[0].message.content

        async def streamed() -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=ASKED, temperature=0, max_tokens=12, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert set(await asyncio.gather(whole(), streamed(), whole(), streamed())) == {PARIS}
