"""An HTTP client that does nothing but note when bytes arrived: a real one would cost more than what is measured."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fakes import MODEL

LATENCY = {"x-slo-class": "latency"}


@dataclass(slots=True)
class Received:
    """One answer: when it was asked for, and each piece of it with the time of its arrival (monotonic nanoseconds)."""

    asked_ns: int
    pieces: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        """All bytes, head and chunk frames included."""
        return b"".join(piece for _, piece in self.pieces)


def request_bytes(body: dict[str, Any], headers: dict[str, str], path: str = "/v1/chat/completions") -> bytes:
    """Return a whole HTTP/1.1 request that closes its connection."""
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: bench", "connection: close", "content-type: application/json"]
    lines += [f"content-length: {len(content)}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


async def ask(port: int, request: bytes, timeout_s: float = 60.0) -> Received:
    """Send a request and read its answer to the end."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        try:
            received = Received(time.monotonic_ns())
            writer.write(request)
            while piece := await reader.read(1 << 20):
                received.pieces.append((time.monotonic_ns(), piece))
            return received
        finally:
            writer.close()


def chat(content: str = "say hello", **fields: Any) -> dict[str, Any]:
    """Return a chat completion request for the scripted model."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
