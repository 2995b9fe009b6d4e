"""The gateway's own calls to vLLM, through Envoy's internal listener: count a prompt, finish an answer, serve a request.

Every call carries the client's own credentials: the gateway may do at vLLM only what its client may.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Annotated, Any, Self

import httpx
import msgspec

from gateway.body import Body
from gateway.eligibility import CHAT_PATH, prompt_fields
from gateway.plan import Plan
from gateway.sse import EventReader
from gateway.tokens import Batch

Credentials = Mapping[bytes, bytes]
"""Header names and values, byte for byte as the client sent them."""

_CREDENTIALS = ("authorization", "x-request-id")
_CONNECT_S = 2.0
_JSON = {b"content-type": b"application/json"}
# A compressed answer would need its content-encoding passed on with it.
_UNCOMPRESSED = {"accept-encoding": "identity"}

_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]


class UpstreamUnavailable(Exception):  # noqa: N818 - an outcome the lane acts on
    """vLLM did not answer, or not with what was asked for."""


class Replayed:
    """vLLM's answer to an original request, byte for byte. To be closed, read or not."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.content_type: str = response.headers.get("content-type", "application/json")

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body; raises UpstreamUnavailable when it breaks off."""
        try:
            async for chunk in self._response.aiter_raw():
                yield chunk
        except httpx.HTTPError as error:
            raise UpstreamUnavailable(f"vLLM's {CHAT_PATH} broke off: {error!r}") from error

    async def aclose(self) -> None:
        """Give the answer up: vLLM stops generating. Idempotent."""
        await self._response.aclose()


class Upstream:
    """Owns the HTTP client."""

    def __init__(self, url: str, *, token_timeout_s: float, tokenize_timeout_s: float, generation_timeout_s: float) -> None:
        self._token_timeout = httpx.Timeout(token_timeout_s, connect=_CONNECT_S)
        self._tokenize_timeout_s = tokenize_timeout_s
        self._generation_timeout = httpx.Timeout(generation_timeout_s, connect=_CONNECT_S)
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=_UNCOMPRESSED,
            timeout=self._token_timeout,
            # A transport of its own: a proxy in the environment is not for calls inside the lane.
            transport=httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None, max_keepalive_connections=32)),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def prompt_ids(self, body: Body, credentials: Credentials) -> list[int] | None:
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
            return read_token_ids(response.json()["tokens"])
        except (httpx.HTTPError, TimeoutError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise UpstreamUnavailable(f"vLLM's /tokenize: {error!r}") from error

    async def replay(self, body: Body, credentials: Credentials) -> Replayed:
        """Send a chat completion as the client sent it; raises UpstreamUnavailable."""
        request = self._client.build_request(
            "POST",
            CHAT_PATH,
            content=body.raw,
            headers={**_JSON, **credentials},
            # An answer that does not stream is silent until it is whole.
            timeout=self._token_timeout if body.get("stream") else self._generation_timeout,
        )
        try:
            return Replayed(await self._client.send(request, stream=True))
        except httpx.HTTPError as error:
            raise UpstreamUnavailable(f"vLLM's {CHAT_PATH}: {error!r}") from error

    async def resume(
        self, plan: Plan, prompt: Sequence[int], done: Sequence[int], max_tokens: int, credentials: Credentials
    ) -> AsyncGenerator[Batch, None]:
        """Let vLLM decode what follows prompt + done; its prefix cache spares it most of the prompt.

        Raises UpstreamUnavailable.
        """
        request = _completion(plan, prompt, done, max_tokens)
        events = EventReader()
        try:
            async with self._client.stream("POST", "/v1/completions", json=request, headers=credentials) as response:
                if response.status_code != 200:
                    raise UpstreamUnavailable(f"vLLM's /v1/completions answered {response.status_code}")
                async for chunk in response.aiter_bytes():
                    for event in events.feed(chunk):
                        batch = _batch(event)
                        yield batch
                        if batch.finish is not None:
                            return
        except (httpx.HTTPError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise UpstreamUnavailable(f"vLLM's /v1/completions: {error!r}") from error
        raise UpstreamUnavailable("vLLM's /v1/completions ended without a finish")


def credentials_in(headers: Mapping[str, str]) -> Credentials:
    """Pick what the gateway's own calls take over from a request's headers (lower-case names, latin-1 values)."""
    return {name.encode(): headers[name].encode("latin-1") for name in _CREDENTIALS if name in headers}


def read_token_ids(value: Any) -> list[int]:
    """Return parsed JSON as token ids; raises ValueError when it is not a list of them."""
    try:
        return msgspec.convert(value, _TokenIds)
    except msgspec.ValidationError as error:
        raise ValueError(f"these are no token ids: {error}") from error


def _completion(plan: Plan, prompt: Sequence[int], done: Sequence[int], max_tokens: int) -> dict[str, Any]:
    sampling = plan.sampling
    request: dict[str, Any] = {
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
    if plan.cache_salt is not None:
        # Without it the prompt's blocks would enter the prefix cache that all clients share.
        request["cache_salt"] = plan.cache_salt
    return request


def _batch(event: bytes) -> Batch:
    """Read one event of a completion; raises ValueError, LookupError or TypeError when it is none, [DONE] included."""
    choice = json.loads(event)["choices"][0]
    finish = choice["finish_reason"]
    if finish not in (None, "stop", "length"):
        raise ValueError(f"vLLM gave up: finish_reason {finish!r}")
    return Batch(tuple(read_token_ids(choice["token_ids"])), finish)
