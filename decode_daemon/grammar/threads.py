"""Threads for work in native code that nothing can interrupt."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """At most so many threads at a time, one a piece of work.

    Not a ThreadPoolExecutor: the process would wait at its end for work that may take hours, and a few such pieces would
    keep all others waiting without anybody knowing.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._free = threading.Semaphore(limit)
        self._name = name

    def run(self, work: Callable[[], T]) -> "Future[T] | None":
        """Begin `work` and return its result to come; None when all threads are at work. Nobody need wait for it."""
        if not self._free.acquire(blocking=False):
            return None
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from now on it cannot be cancelled

        def body() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
                self._free.release()
                future.set_exception(error)
            else:
                self._free.release()
                future.set_result(result)

        threading.Thread(target=body, name=self._name, daemon=True).start()
        return future
