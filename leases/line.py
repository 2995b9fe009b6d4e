"""One connection that carries many calls at once: each is written when it is made, and the replies come in the same order.

For many small calls that is several times cheaper than a pool of connections, each with one call at a time. It also keeps
order: what is called later arrives later, so whoever gives up a call can undo it with the next one.
"""

import asyncio
import math
from collections import deque
from typing import Any

from redis.asyncio import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError, ResponseError


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

    async def call(self, packed: bytes, deadline: float) -> Any:
        """Send a command in Redis' protocol and return its reply.

        Cancelling abandons the reply and leaves the line as it is. A reply that has not come at `deadline`, by the event
        loop's clock, is a TimeoutError, and ends the connection for all others on it: it has probably gone dead. Raises
        RedisError or OSError; unless it is a ResponseError, the server may have run the command or not.
        """
        loop = asyncio.get_running_loop()
        if self._connection is None or not self._connection.is_connected:
            async with asyncio.timeout_at(deadline):
                await self._open()
        connection, due = self._connection, self._due
        if connection is None or not connection.is_connected:
            raise RedisConnectionError("the connection was lost at once")
        reply: asyncio.Future[Any] = loop.create_future()
        due.append(reply)
        late = loop.call_at(deadline, self._give_up, reply, due)  # asyncio.timeout costs several times that
        try:
            await connection.send_packed_command(packed, check_health=False)
            return await reply
        except BaseException as error:
            if not reply.done():  # or it was cancelled while it waited
                # Cancelled or failed while it was written: how much of it is not known, and redis-py has hung up.
                reply.cancel()
                self._fail(due, RedisConnectionError(f"connection lost: {error or type(error).__name__}"))
            elif not reply.cancelled():
                reply.exception()  # known, even where it is another one that is raised
            raise
        finally:
            late.cancel()

    async def aclose(self) -> None:
        """Close the connection; calls that wait fail."""
        self._fail(self._due, RedisConnectionError("the line is closed"))
        reader, self._reader = self._reader, None
        if reader is not None:
            await asyncio.wait([reader])

    async def _open(self) -> None:
        async with self._opening:
            if self._connection is not None and self._connection.is_connected:
                return
            reader = self._reader
            if reader is not None:  # of a connection that failed: it takes no time to be through with it
                await asyncio.wait([reader])
            connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
            due: deque[asyncio.Future[Any]] = deque()
            self._due = due
            reader = self._reader = asyncio.create_task(self._read(connection, due), name="lease-line")
            try:
                await asyncio.sleep(0)  # a task cancelled before its first step would not let go of the connection
            finally:  # whoever is cancelled just here leaves a line that is open all the same
                if not (reader.done() or reader.cancelling()) and connection.is_connected:
                    self._connection = connection

    def _give_up(self, reply: "asyncio.Future[Any]", due: "deque[asyncio.Future[Any]]") -> None:
        if not reply.done():
            reply.set_exception(TimeoutError("no answer in time"))
            self._fail(due, RedisConnectionError("the connection was given up: it did not answer in time"))

    async def _read(self, connection: Any, due: "deque[asyncio.Future[Any]]") -> None:
        try:
            while True:
                try:
                    result, refusal = await connection.read_response(timeout=math.inf, disconnect_on_error=False), None
                except ReadOnlyError as error:
                    raise RedisConnectionError(f"the server is no primary any more: {error}") from error
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
            self._fail(due, RedisConnectionError("the connection was closed"))
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
