"""A scriptable vLLM, for what must be measured or broken without a model: it speaks OpenAI over HTTP, and takes claims."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from benchmarks.fakes import END, MODEL, PROMPT_IDS, SERVING, now_ticks, stamp_text
from handoff.claim import CLAIM_KEY
from handoff.prompt import digest, packed

_MAX_BODY = 256 << 20


@dataclass(slots=True)
class VllmScript:
    """How the fake vLLM answers; a request may override fields with x-fake-<field> headers."""

    first_token: int = ord("H")
    status: int = 200
    delay_s: float = 0.0
    finish_reason: str = "length"
    hand_over: bool = True  # answer a claim as the connector does
    plain_text: str = "plain"  # of a request without a claim, one byte a token
    plain_stamps: int = 0  # instead of the text: so many stamped chunks
    plain_interval_s: float = 0.0
    resumed: Sequence[int] = (ord("!"), END)  # what /v1/completions goes on with


@dataclass(slots=True)
class FakeVllm:
    """An OpenAI server that remembers what it was asked."""

    script: VllmScript = field(default_factory=VllmScript)
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)  # path, headers, body
    port: int = 0
    tokens_per_prompt: int = 16  # what /tokenize counts
    remember: bool = True
    cancelled: int = 0  # requests whose client left before the answer

    def bodies(self, path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        """Return the JSON bodies that a path received."""
        return [json.loads(body) for asked, _, body in self.requests if asked == path]

    @asynccontextmanager
    async def running(self, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator["FakeVllm"]:
        """Serve on a port (0: any)."""
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        await self._note(request)
        return web.json_response({"count": self.tokens_per_prompt, "tokens": list(range(self.tokens_per_prompt))})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._note(request)
        script = self._scripted(request)
        try:
            await asyncio.sleep(script.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if script.status != 200:
            error = {"message": f"scripted {script.status}", "type": "scripted", "param": None, "code": script.status}
            return web.json_response({"error": error}, status=script.status)
        asked = json.loads(body)
        claimed = CLAIM_KEY in (asked.get("kv_transfer_params") or {})
        if asked.get("stream"):
            return await self._plain_stream(request, script)
        text = chr(script.first_token) if claimed else script.plain_text
        return web.json_response(
            _whole(
                "chatcmpl",
                "chat.completion",
                {"message": {"role": "assistant", "content": text}},
                text,
                script,
                claimed=claimed,
            )
        )

    async def _plain_stream(self, request: web.Request, script: VllmScript) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index in range(script.plain_stamps or len(script.plain_text)):
            if script.plain_interval_s:
                await asyncio.sleep(script.plain_interval_s)
            text = stamp_text(now_ticks()) if script.plain_stamps else script.plain_text[index]
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            chunk = {
                "id": "chatcmpl-plain",
                "object": "chat.completion.chunk",
                "created": 1,
                "model": MODEL,
                "choices": [choice],
            }
            await response.write(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = json.loads(await self._note(request))
        script = self._scripted(request)
        if not asked.get("stream"):
            claimed = CLAIM_KEY in (asked.get("kv_transfer_params") or {})
            text = chr(script.first_token) if claimed else script.plain_text
            return web.json_response(_whole("cmpl", "text_completion", {"text": text}, text, script, claimed=claimed))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index, token in enumerate(script.resumed):
            finish = "stop" if token == END else "length" if index == len(script.resumed) - 1 else None
            choice = {"index": 0, "text": "", "token_ids": [token], "finish_reason": finish}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _note(self, request: web.Request) -> bytes:
        body = await request.read()
        if self.remember:
            self.requests.append((request.path, dict(request.headers), body))
        return body

    def _scripted(self, request: web.Request) -> VllmScript:
        script = VllmScript(**{name: getattr(self.script, name) for name in VllmScript.__dataclass_fields__})
        for name, convert in (("status", int), ("delay_s", float), ("finish_reason", str)):
            value = request.headers.get(f"x-fake-{name.replace('_', '-')}")
            if value is not None:
                setattr(script, name, convert(value))
        return script


def _whole(prefix: str, kind: str, said: dict[str, Any], text: str, script: VllmScript, *, claimed: bool) -> dict[str, Any]:
    prompt = {"prompt_tail": list(PROMPT_IDS), "prompt_digest": digest(packed(PROMPT_IDS))}
    handed = {CLAIM_KEY: {"first_token": script.first_token, **prompt, "serving": SERVING}}
    finish = script.finish_reason if claimed else "stop"
    return {
        "id": f"{prefix}-{time.monotonic_ns()}",  # an answer tells when it was given
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, **said, "finish_reason": finish, "stop_reason": None, "logprobs": None}],
        "usage": {
            "prompt_tokens": len(PROMPT_IDS),
            "total_tokens": len(PROMPT_IDS) + len(text),
            "completion_tokens": len(text),
        },
        "kv_transfer_params": handed if claimed and script.hand_over else None,
    }


async def serve_vllm(port: int, script: VllmScript) -> None:
    """Run a fake vLLM that remembers nothing, until cancelled."""
    async with FakeVllm(script=script, remember=False).running(port):
        await asyncio.Event().wait()
