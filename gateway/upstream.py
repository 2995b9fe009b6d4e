"""The gateway's own calls to vLLM, through Envoy's internal listener: count a prompt, finish an answer, serve a request.

Every call carries the client's own credentials: the gateway may do at vLLM only what its client may.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from gateway.body import Body
from gateway.eligibility import CHAT_PATH, prompt_fields
from gateway.plan import Plan

_CONNECT_S = 2.0
_JSON = {"content-type": "application/json"}


class UpstreamUnavailable(Exception):  # noqa: N818 - an outcome the lane acts on
    """vLLM did not answer, or not with what was asked for."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens in order; `finish` ("stop" or "length") with the last one only. On "stop" the last id is the stop id."""

    ids: tuple[int, ...]
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """vLLM's answer to an original request, byte for byte."""

    status: int
    content_type: str
    chunks: AsyncGenerator[bytes, None]


class Upstream:
    """Owns the HTTP client."""

    def __init__(self, url: str, *, token_timeout_s: float, tokenize_timeout_s: float) -> None:
        self._tokenize_timeout_s = tokenize_timeout_s
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(token_timeout_s, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def prompt_ids(self, body: Body, credentials: Mapping[str, str]) -> list[int] | None:
        """Return the prompt's token ids as vLLM makes them; None when vLLM refuses the request (it will say why itself).

        Raises UpstreamUnavailable.
        """
        content = body.with_members(prompt_fields(), {})
        try:
            async with asyncio.timeout(self._tokenize_timeout_s):
                response = await self._client.post("/tokenize", content=content, headers={**_JSON, **credentials})
            if response.status_code >= 500:
                raise UpstreamUnavailable(f"vLLM's /tokenize answered {response.status_code}")
            if response.status_code != 200:
                return None
            ids = response.json()["tokens"]
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise UpstreamUnavailable(f"vLLM's /tokenize: {error!r}") from error
        return [int(token) for token in ids]

    async def replay(self, body: Body, credentials: Mapping[str, str]) -> Replayed:
        """Send a chat completion as the client sent it; raises UpstreamUnavailable."""
        request = self._client.build_request("POST", CHAT_PATH, content=body.raw, headers={**_JSON, **credentials})
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise UpstreamUnavailable(f"vLLM's {CHAT_PATH}: {error!r}") from error
        return Replayed(response.status_code, response.headers.get("content-type", "application/json"), _bytes(response))

    async def resume(
        self, plan: Plan, prompt: Sequence[int], done: Sequence[int], max_tokens: int, credentials: Mapping[str, str]
    ) -> AsyncGenerator[Batch, None]:
        """Let vLLM decode what follows prompt + done; its prefix cache spares it most of the prompt.

        Raises UpstreamUnavailable.
        """
        sampling = plan.sampling
        request = {
            "model": plan.model,
            "prompt": [*prompt, *done],
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "ignore_eos": sampling.ignore_eos,
            "stream": True,
            "return_token_ids": True,
        }
        if sampling.seed is not None:
            # The same seed again would repeat the first token's draw.
            request["seed"] = (sampling.seed + len(done)) % 2**63
        try:
            async with self._client.stream("POST", "/v1/completions", json=request, headers=credentials) as response:
                if response.status_code != 200:
                    raise UpstreamUnavailable(f"vLLM's /v1/completions answered {response.status_code}")
                async for event in _events(response):
                    choice = event["choices"][0]
                    batch = Batch(tuple(choice.get("token_ids") or ()), choice.get("finish_reason"))
                    yield batch
                    if batch.finish is not None:
                        return
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise UpstreamUnavailable(f"vLLM's /v1/completions: {error!r}") from error
        raise UpstreamUnavailable("vLLM's /v1/completions ended without a finish")


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event; comments and empty lines are none."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            yield json.loads(data)


async def _bytes(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    finally:
        await response.aclose()
