"""What lies between a connector and a daemon's control socket: it keeps messages, and passes them on late or never."""

import asyncio
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Self

HOST = "127.0.0.1"


@dataclass
class _Kept:
    """What one way of a connection has not passed on."""

    connection: "asyncio.Task[None]"
    content: bytearray = field(default_factory=bytearray)


class Notices:
    """A relay to a control port. Use it as `async with Notices(port) as notices`, and let claims name `notices.port`."""

    def __init__(self, daemon: int) -> None:
        self.port = 0
        self.begun = asyncio.Event()  # a writer has asked for its landing region since `keep`
        self.kept = asyncio.Event()  # as many messages as `keep` was told are being kept
        self._daemon = daemon
        self._kinds: tuple[bytes, ...] = ()
        self._missing = 0  # messages to keep before `kept`
        self._keeping: dict[asyncio.StreamWriter, _Kept] = {}
        self._listener: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

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

    def keep(self, *kinds: str, messages: int = 1) -> None:
        """From the next message of such a kind on, nothing that follows it on its way passes, to the daemon or from it.

        `kept` is set once there are so many messages of these kinds.
        """
        self._kinds = tuple(kind.encode() for kind in kinds)
        self._missing = messages
        self.begun.clear()
        self.kept.clear()

    def pass_on(self) -> None:
        """What was kept arrives now, and what follows arrives as it comes."""
        self._kinds = ()
        keeping, self._keeping = self._keeping, {}
        for writer, kept in keeping.items():
            writer.write(bytes(kept.content))

    def lose(self) -> None:
        """What was kept never arrives, and its connections break; the next ones are in order."""
        keeping, self._keeping = self._keeping, {}
        for kept in keeping.values():
            kept.connection.cancel()
        self.pass_on()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        with closing(writer), suppress(OSError, asyncio.CancelledError):
            answers, words = await asyncio.open_connection(HOST, self._daemon)
            with closing(words):
                ways = [asyncio.create_task(self._carry(*way, connection=task)) for way in ((reader, words), (answers, writer))]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, connection: "asyncio.Task[None]"
    ) -> None:
        try:
            while chunk := await reader.read(65_536):
                if b"Begin" in chunk:
                    self.begun.set()
                if found := sum(map(chunk.count, self._kinds)):
                    self._keeping.setdefault(writer, _Kept(connection))
                    self._missing -= found
                    if self._missing <= 0:
                        self.kept.set()
                if writer in self._keeping:
                    self._keeping[writer].content += chunk
                else:
                    writer.write(chunk)
        finally:
            self._keeping.pop(writer, None)
