"""One connection that carries many calls at once: each is written when it is made, and the replies come in the same order.

For many small calls that is several times cheaper than a pool of connections, each with one call at a time. It also keeps
order: what is called later arrives later, so whoever gives up a call can undo it with the next one.
"""

import asyncio
import math
from collections import deque
from contextlib import suppress
from typing import Any

from redis.asyncio import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError


class Line:
    """Opens its connection with the first call, and a new one with the first call after a failure.

    Args:
        pool: knows how to connect and authenticate. Its connections must have no `socket_timeout`: the caller
            bounds the whole call.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._opening = asyncio.Lock()
        self._connection: Any = None  # of the pool's class
        self._due: deque[asyncio.Future[Any]] = deque()
        self._reader: asyncio.Task[None] | None = None

    async def call(self, packed: bytes) -> Any:
        """Send a command in Redis' protocol and return its reply.

        Cancelling abandons the reply and leaves the line as it is. Raises RedisError or OSError; unless it is a
        ResponseError, the server may have run the command or not.
        """
        connection, due = await self._open()
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        due.append(reply)
        try:
            await connection.send_packed_command(packed, check_health=False)
        except BaseException as error:
            # What was written of it is not known, and redis-py has closed the connection.
            reply.cancel()
            self._fail(due, RedisConnectionError(f"connection lost: {error or type(error).__name__}"))
            raise
        return await reply

    def drop(self) -> None:
        """Give the connection up, as one that does not answer: every call that waits on it fails."""
        self._fail(self._due, RedisConnectionError("the connection was given up because a call took too long"))

    async def aclose(self) -> None:
        """Close the connection; calls that wait fail."""
        self._fail(self._due, RedisConnectionError("the line is closed"))
        reader, self._reader = self._reader, None
        if reader is not None:
            with suppress(asyncio.CancelledError):
                await reader

    async def _open(self) -> "tuple[Any, deque[asyncio.Future[Any]]]":
        """Return a connection that stands, and the futures of the replies that are due on it."""
        while self._connection is None or not self._connection.is_connected:
            async with self._opening:
                if self._connection is not None and self._connection.is_connected:
                    break
                reader = self._reader
                if reader is not None:  # of a connection that failed: it takes no time to be through with it
                    await asyncio.wait([reader])
                connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
                due: deque[asyncio.Future[Any]] = deque()
                self._reader = asyncio.create_task(self._read(connection, due), name="lease-line")
                await asyncio.sleep(0)  # a task cancelled before its first step would not let go of the connection
                self._connection, self._due = connection, due
        return self._connection, self._due

    async def _read(self, connection: Any, due: "deque[asyncio.Future[Any]]") -> None:
        try:
            while True:
                try:
                    result, refusal = await connection.read_response(timeout=math.inf, disconnect_on_error=False), None
                except ResponseError as error:
                    result, refusal = None, error
                reply = due.popleft()
                if reply.done():
                    continue  # its caller has left
                if refusal is None:
                    reply.set_result(result)
                else:
                    reply.set_exception(refusal)
        except (RedisError, OSError, IndexError) as error:
            # An IndexError is a reply that nobody asked for: which one belongs to whom is not known any more.
            reason = str(error) or type(error).__name__
            self._fail(due, error if isinstance(error, RedisError) else RedisConnectionError(f"connection lost: {reason}"))
        finally:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    def _fail(self, due: "deque[asyncio.Future[Any]]", error: Exception) -> None:
        if due is self._due:
            self._connection = None
            if self._reader is not None and self._reader is not asyncio.current_task():
                self._reader.cancel()
        while due:
            reply = due.popleft()
            if not reply.done():
                reply.set_exception(error)
