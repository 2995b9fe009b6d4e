"""Is a process ready? Asked of the process itself, over the network, with nothing but the standard library.

A check is written as a URL: `http://host:port/path` wants status 200, `redis://host:port` wants PONG, and
`tcp://host:port` wants a connection.
"""

import asyncio
from urllib.parse import SplitResult, urlsplit

ANSWER_TIMEOUT_S = 5.0


async def why_not_ready(url: str) -> str | None:
    """None when the check passes, else what was found instead, in a few words.

    Raises:
        ValueError: the URL is none of the three kinds.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "redis", "tcp") or parts.hostname is None or parts.port is None:
        raise ValueError(f"a ready check is http://, redis:// or tcp:// with host and port, not {url!r}")
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await _ask(parts)
    except TimeoutError:
        return f"{url} gave no answer for {ANSWER_TIMEOUT_S:g} s"
    except OSError as error:
        return f"{url}: {error.strerror or error}"


async def _ask(parts: SplitResult) -> str | None:
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        if parts.scheme == "tcp":
            return None
        question = b"PING\r\n"
        wanted: tuple[bytes, ...] = (b"+PONG",)
        if parts.scheme == "http":
            path = parts.path or "/"
            question = f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()
            wanted = b"HTTP/1.1 200", b"HTTP/1.0 200"
        writer.write(question)
        await writer.drain()
        answer = await reader.readline()
        return None if answer.startswith(wanted) else f"{parts.geturl()} answered {answer.decode(errors='replace').strip()!r}"
    finally:
        writer.close()
