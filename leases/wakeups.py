"""One subscription per process, on which the table names the waiters that were given a slot.

A message is a hint and nothing more: it can be lost, so every waiter looks for itself now and then.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import structlog
from redis.exceptions import RedisError

_log = structlog.get_logger(__name__)

_READ_S = 5.0
_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 5.0


class Wakeups:
    """Listens from the first waiter on, until closed.

    Args:
        pubsub: makes a subscription object of the client.
        channel: this process' own.
    """

    def __init__(self, pubsub: Callable[[], Any], channel: str) -> None:
        self.channel = channel
        self._pubsub = pubsub
        self._events: dict[str, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def expected(self, nonce: str) -> Iterator[asyncio.Event]:
        """Yield the event of a wish. It is set, too, once the subscription stands: what was said before that is lost."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="lease-wakeups")
        event = self._events[nonce] = asyncio.Event()
        try:
            yield event
        finally:
            self._events.pop(nonce, None)

    def wake_all(self) -> None:
        """Let every waiter look for itself."""
        for event in self._events.values():
            event.set()

    async def aclose(self) -> None:
        """Stop listening."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        backoff_s, away = _FIRST_BACKOFF_S, False
        while True:
            pubsub = self._pubsub()
            try:
                async with asyncio.timeout(_READ_S):
                    await pubsub.subscribe(self.channel)
                self.wake_all()
                backoff_s, away = _FIRST_BACKOFF_S, False
                while True:
                    message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=_READ_S)
                    if message is not None and (event := self._events.get(message["data"])) is not None:
                        event.set()
            except (RedisError, OSError) as error:
                if not away:
                    reason = str(error) or type(error).__name__
                    _log.warning("lease_wakeups_lost", error=reason, consequence="waiters look for themselves")
                away = True
            finally:
                with suppress(RedisError, OSError):
                    await pubsub.aclose()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)
