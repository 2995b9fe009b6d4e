"""Clients that people use besides OpenAI's own: LangChain, and curl."""

import asyncio
import json

import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.fidelity.case import CAPITAL, MODEL
from tests.fidelity.stacks import Running

pytestmark = pytest.mark.timeout(600)
on_the_stacks_loop = pytest.mark.asyncio(loop_scope="session")

LATENCY = {"x-slo-class": "latency", "x-slo-max-wait-ms": "20000"}
PARIS = "The capital of France is Paris."


class Sum(BaseModel):
    total: int


@pytest.fixture
def langchain(running: Running) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=running.base_url,
        api_key=SecretStr("any"),
        model=MODEL,
        temperature=0,
        max_completion_tokens=40,
        default_headers=LATENCY,
        include_response_headers=True,
        max_retries=0,
    )


@on_the_stacks_loop
async def test_langchain_invokes_the_lane(langchain: ChatOpenAI) -> None:
    answer = await langchain.ainvoke(CAPITAL)
    assert answer.content == PARIS
    assert answer.response_metadata["headers"]["x-slo-lane"] == "latency"
    assert answer.response_metadata["finish_reason"] == "stop"


def test_langchain_invokes_the_lane_without_a_loop(langchain: ChatOpenAI) -> None:
    assert langchain.invoke(CAPITAL).content == PARIS


@on_the_stacks_loop
async def test_langchain_streams_from_the_lane(langchain: ChatOpenAI) -> None:
    chunks = [chunk async for chunk in langchain.astream(CAPITAL)]
    assert "".join(str(chunk.content) for chunk in chunks) == PARIS
    assert len(chunks) > 2


@on_the_stacks_loop
async def test_langchain_has_structured_output_from_the_lane(langchain: ChatOpenAI) -> None:
    answer = await langchain.with_structured_output(Sum, method="json_schema").ainvoke("What is 1 + 1? Answer in JSON.")
    assert isinstance(answer, Sum)


async def _curl(running: Running, *arguments: str, **fields: object) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": CAPITAL}], "temperature": 0, "max_tokens": 12, **fields}
    command = ["--silent", "--show-error", "--no-buffer", *arguments]
    command += ["--header", "content-type: application/json", "--header", "x-slo-class: latency"]
    command += ["--data", json.dumps(body), f"{running.base_url}/chat/completions"]
    process = await asyncio.create_subprocess_exec("curl", *command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


@on_the_stacks_loop
async def test_curl_gets_one_json_object(running: Running) -> None:
    head, _, body = (await _curl(running, "--include", "--http1.1")).partition("\r\n\r\n")
    assert "x-slo-lane: latency" in head
    assert json.loads(body)["choices"][0]["message"]["content"] == PARIS


@on_the_stacks_loop
async def test_curl_gets_a_whole_stream(running: Running) -> None:
    events = (await _curl(running, stream=True)).strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    contents = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"]["content"] for event in events[:-1]]
    assert "".join(contents) == PARIS


@on_the_stacks_loop
async def test_curl_with_http2_gets_a_whole_stream(running: Running) -> None:
    events = (await _curl(running, "--http2-prior-knowledge", stream=True)).strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
