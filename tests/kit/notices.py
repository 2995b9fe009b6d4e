"""What lies between a connector and a daemon's control socket: it keeps messages, and passes them on late or never."""

import asyncio
from contextlib import closing, suppress
from typing import Self

HOST = "127.0.0.1"


class Notices:
    """A relay to a control port. Use it as `async with Notices(port) as notices`, and let claims name `notices.port`."""

    def __init__(self, daemon: int) -> None:
        self.port = 0
        self.begun = asyncio.Event()  # a writer has asked for its landing region since `keep`
        self.kept = asyncio.Event()  # something is being kept
        self._daemon = daemon
        self._kinds: tuple[bytes, ...] = ()
        self._passes = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._keeping: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._connected, HOST)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._listener.wait_closed()

    def keep(self, *kinds: str) -> None:
        """From the next message of such a kind on, nothing that follows on its connection passes to the daemon."""
        self._kinds = tuple(kind.encode() for kind in kinds)
        self._passes.clear()
        self.begun.clear()
        self.kept.clear()

    def pass_on(self) -> None:
        """What was kept reaches the daemon now, and what follows reaches it as it comes."""
        self._kinds = ()
        self._passes.set()

    def lose(self) -> None:
        """What was kept never arrives, and its connections break; the next ones are in order."""
        for connection in self._keeping:
            connection.cancel()
        self.pass_on()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        with closing(writer), suppress(OSError, asyncio.CancelledError):
            answers, words = await asyncio.open_connection(HOST, self._daemon)
            with closing(words):
                ways = [asyncio.create_task(self._told(reader, words, task)), asyncio.create_task(_answered(answers, writer))]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _told(self, reader: asyncio.StreamReader, words: asyncio.StreamWriter, connection: "asyncio.Task[None]") -> None:
        while chunk := await reader.read(65_536):
            if b"Begin" in chunk:
                self.begun.set()
            if any(kind in chunk for kind in self._kinds):
                self._keeping.add(connection)
                self.kept.set()
                try:
                    await self._passes.wait()
                finally:
                    self._keeping.discard(connection)
            words.write(chunk)


async def _answered(answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await answers.read(65_536):
        writer.write(chunk)
