"""The gateway's own calls to vLLM, through Envoy's internal listener: count a prompt, finish an answer, serve a request.

Every call carries the client's own credentials: the gateway may do at vLLM only what its client may.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from gateway.body import Body
from gateway.endpoints import Endpoint
from gateway.logprobs import read_chat_logprobs, read_completion_logprobs
from gateway.sse import EventReader
from gateway.tokens import Batch, TokenId

Credentials = Mapping[bytes, bytes]
"""Header names and values, byte for byte as the client sent them."""


_CREDENTIALS = ("authorization", "x-request-id", "x-data-parallel-rank", "x-session-id", "x-vllm-priority")  # vLLM reads them
_CONNECT_S = 2.0
_JSON = {b"content-type": b"application/json"}
# A compressed answer would need its content-encoding passed on with it.
_UNCOMPRESSED = {"accept-encoding": "identity"}


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
            raise UpstreamUnavailable(f"vLLM's {self._response.url.path} broke off: {error!r}") from error

    async def aclose(self) -> None:
        """Give the answer up: vLLM stops generating. Idempotent."""
        await self._response.aclose()


class Upstream:
    """Owns the HTTP client."""

    def __init__(self, url: str, *, token_timeout_s: float, tokenize_timeout_s: float, generation_timeout_s: float) -> None:
        self.token_timeout_s = token_timeout_s
        self.tokenize_timeout_s = tokenize_timeout_s
        self._token_timeout = httpx.Timeout(token_timeout_s, connect=_CONNECT_S)
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

    async def post(self, path: str, content: bytes, credentials: Credentials, timeout_s: float) -> tuple[int, bytes]:
        """Send JSON; returns status and body. Raises UpstreamUnavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.post(path, content=content, headers={**_JSON, **credentials})
        except (httpx.HTTPError, TimeoutError) as error:
            raise UpstreamUnavailable(f"vLLM's {path}: {error!r}") from error
        return response.status_code, response.content

    async def prompt_ids(self, tokenize_body: bytes, credentials: Credentials) -> list[int] | None:
        """Return a prompt's token ids as vLLM makes them; None when vLLM refuses the request (it will say why itself).

        Raises UpstreamUnavailable.
        """
        status, content = await self.post("/tokenize", tokenize_body, credentials, self.tokenize_timeout_s)
        if status >= 500:
            raise UpstreamUnavailable(f"vLLM's /tokenize answered {status}")
        if status != 200:
            return None
        try:
            return msgspec.json.decode(content, type=_Tokenized).tokens
        except (ValueError, RecursionError) as error:
            raise UpstreamUnavailable(f"vLLM's /tokenize: {error!r}") from error

    async def replay(self, endpoint: Endpoint, body: Body, credentials: Credentials) -> Replayed:
        """Send a request as the client sent it; raises UpstreamUnavailable."""
        request = self._client.build_request(
            "POST",
            endpoint,
            content=body.raw,
            headers={**_JSON, **credentials},
            # An answer that does not stream is silent until it is whole.
            timeout=self._token_timeout if body.get("stream") else self._generation_timeout,
        )
        try:
            return Replayed(await self._client.send(request, stream=True))
        except httpx.HTTPError as error:
            raise UpstreamUnavailable(f"vLLM's {endpoint}: {error!r}") from error

    async def tokens(self, endpoint: Endpoint, content: bytes, credentials: Credentials) -> AsyncGenerator[Batch, None]:
        """Yield the tokens of a streaming request, up to its finish.

        It must ask for return_token_ids, for return_tokens_as_token_ids with logprobs, and for no stop strings. Raises
        UpstreamUnavailable.
        """
        events = EventReader()
        headers = {**_JSON, **credentials}
        try:
            async with self._client.stream("POST", endpoint, content=content, headers=headers) as response:
                if response.status_code != 200:
                    raise UpstreamUnavailable(f"vLLM's {endpoint} answered {response.status_code}")
                async for chunk in response.aiter_bytes():
                    for event in events.feed(chunk):
                        batch = read_batch(endpoint, event)
                        if batch.ids or batch.finish is not None:
                            yield batch
                        if batch.finish is not None:
                            return
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise UpstreamUnavailable(f"vLLM's {endpoint}: {error!r}") from error
        raise UpstreamUnavailable(f"vLLM's {endpoint} ended without a finish")


def credentials_in(headers: Mapping[str, str]) -> Credentials:
    """Pick what the gateway's own calls take over from a request's headers (lower-case names, latin-1 values)."""
    return {name.encode(): headers[name].encode("latin-1") for name in _CREDENTIALS if name in headers}


class _Tokenized(msgspec.Struct):
    tokens: list[TokenId]


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None
    token_ids: list[TokenId] | None = None
    logprobs: Any = None
    delta: _Delta | None = None  # of a chat


class _Event(msgspec.Struct):
    choices: list[_Choice]


def read_batch(endpoint: Endpoint, event: bytes) -> Batch:
    """Read one event of a stream that tells token ids; raises ValueError when it is none, [DONE] included."""
    try:
        (choice,) = msgspec.json.decode(event, type=_Event).choices
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no event of {endpoint}: {error!r}") from error
    if choice.finish_reason not in (None, "stop", "length"):
        raise ValueError(f"vLLM gave up: finish_reason {choice.finish_reason!r}")
    if choice.token_ids is None:
        # A chat's first event tells its role, before any token.
        if choice.delta is None or choice.delta.content or choice.finish_reason is not None:
            raise ValueError("vLLM does not tell token ids")
        return Batch(())
    ids = tuple(choice.token_ids)
    if choice.logprobs is None:
        return Batch(ids, choice.finish_reason)
    read = read_chat_logprobs if endpoint is Endpoint.CHAT else read_completion_logprobs
    return Batch(ids, choice.finish_reason, read(choice.logprobs, ids))
