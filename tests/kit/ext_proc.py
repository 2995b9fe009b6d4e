"""Envoy's end of an ext_proc call."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import grpc.aio
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext


def header_map(headers: Sequence[tuple[str, bytes]]) -> HeaderMap:
    return HeaderMap(headers=[HeaderValue(key=key, raw_value=value) for key, value in headers])


LATENCY = (("x-slo-class", b"latency"),)


def request_headers(
    *extra: tuple[str, bytes], method: str = "POST", path: str = "/v1/chat/completions", end: bool = False
) -> ext.ProcessingRequest:
    headers = [(":method", method.encode()), (":path", path.encode()), *(extra or LATENCY)]
    return ext.ProcessingRequest(request_headers=ext.HttpHeaders(headers=header_map(headers), end_of_stream=end))


def request_body(content: bytes) -> ext.ProcessingRequest:
    return ext.ProcessingRequest(request_body=ext.HttpBody(body=content, end_of_stream=True))


def response_headers(status: int = 200, *, end: bool = False) -> ext.ProcessingRequest:
    headers = header_map([(":status", str(status).encode())])
    return ext.ProcessingRequest(response_headers=ext.HttpHeaders(headers=headers, end_of_stream=end))


def response_body(content: bytes, *, end: bool = True) -> ext.ProcessingRequest:
    return ext.ProcessingRequest(response_body=ext.HttpBody(body=content, end_of_stream=end))


def response_trailers() -> ext.ProcessingRequest:
    return ext.ProcessingRequest(response_trailers=ext.HttpTrailers())


class ScriptedWire:
    """Sends these messages, then the end of the call, or nothing more; keeps what is written."""

    def __init__(self, *messages: ext.ProcessingRequest, then: Literal["eof", "hang"] = "eof") -> None:
        self._messages = list(messages)
        self._then = then
        self.written: list[ext.ProcessingResponse] = []
        self.drained = asyncio.Event()  # everything was read, and more is waited for
        self.full_after: int | None = None  # writes block after so many
        self.blocked = asyncio.Event()

    async def read(self) -> Any:
        await asyncio.sleep(0)
        if self._messages:
            return self._messages.pop(0)
        self.drained.set()
        if self._then == "hang":
            await asyncio.Event().wait()
        return grpc.aio.EOF

    async def write(self, message: ext.ProcessingResponse) -> None:
        if self.full_after is not None and len(self.written) >= self.full_after:
            self.blocked.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        self.written.append(message)
