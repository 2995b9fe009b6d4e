"""One polite stop signal, then the system's own behaviour.

The first SIGTERM or SIGINT asks the process to stop. A second one ends it at once, because whoever sends it
twice does not want to wait for the clean-up.
"""

import asyncio
import signal
from types import TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Catches SIGTERM and SIGINT within an `async with` block of the main thread."""

    def __init__(self) -> None:
        self._received: asyncio.Future[signal.Signals]
        self._before: dict[signal.Signals, Any] = {}

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._received = loop.create_future()
        for number in STOP_SIGNALS:
            self._before[number] = signal.getsignal(number)
            loop.add_signal_handler(number, self._on_signal, number)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number, handler in self._before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    async def wait(self) -> signal.Signals:
        """The first stop signal, as soon as it has arrived."""
        return await asyncio.shield(self._received)

    @property
    def received(self) -> bool:
        """Whether a stop signal has arrived."""
        return self._received.done()

    def _on_signal(self, number: signal.Signals) -> None:
        loop = asyncio.get_running_loop()
        for each in STOP_SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        self._received.set_result(number)
