"""The processes of ranks 1 and on, as rank 0 has them: started, told and heard over a pipe each, and ended.

Nothing here waits without a bound: a pipe is written to only where there is room for more than is written, and read only where
something has been said.
"""

import multiprocessing
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from decode_daemon.engine.cuda.follower import DONE

_LAST_WORDS_S = 2.0  # for a lost rank's process to end, once its silence is known
_BREATH_MS = 10  # between two looks at the others while one is waited for


class Others:
    """Owns the processes and their pipes. Not thread-safe."""

    def __init__(self) -> None:
        self.lost: dict[int, str] = {}  # last words, or how the process ended, by rank
        self._children: dict[int, SpawnProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._room: dict[int, select.poll] = {}
        self._said = select.poll()
        self._done: set[int] = set()  # ranks that have said so of the present stage of the start

    def start(self, rank: int, live: Callable[..., None], *wanted: Any) -> None:
        """Start the process of `rank`: `live(rank, *wanted, pipe)` is its whole life."""
        context = multiprocessing.get_context("spawn")  # what CUDA has begun in this process, a fork could not go on with
        ours, theirs = context.Pipe()
        self._pipes[rank] = ours
        self._said.register(ours, select.POLLIN)
        self._room[rank] = select.poll()
        self._room[rank].register(ours, select.POLLOUT)
        child = context.Process(target=live, args=(rank, *wanted, theirs), name=f"anchorleg rank {rank}", daemon=True)
        with theirs:  # so that only the child has it, and its end is the pipe's
            child.start()
        self._children[rank] = child

    def tell(self, rank: int, words: bytes, seconds: float) -> None:
        """Send `words`, a few hundred bytes, to `rank`. Raises TimeoutError, or OSError where the process has ended."""
        end = time.monotonic() + seconds
        # A pipe has room when three quarters of its 200 KB are empty: what is sent then is never waited for.
        while not self._room[rank].poll(_BREATH_MS):
            if time.monotonic() > end or self.heard():
                raise TimeoutError(f"has not read what it was told for {seconds:.0f} s")
        self._pipes[rank].send_bytes(words)

    def heard(self, wait_s: float = 0.0) -> bool:
        """Take in what is said within `wait_s`; whether a rank is lost."""
        for number, _ in self._said.poll(1000 * wait_s):
            self._hear(next(rank for rank, pipe in self._pipes.items() if pipe.fileno() == number))
        return bool(self.lost)

    def missing(self) -> Sequence[int]:
        """Ranks that have not said yet that they are done with the present stage of the start; none, and the next begins."""
        missing = sorted(self._pipes.keys() - self._done)
        if not missing:
            self._done.clear()
        return missing

    def last_words(self) -> str:
        """What the lost ranks have said, waiting a moment for it; empty when none is lost."""
        for pipe in connection.wait(list(self._pipes.values()), 0 if self.lost else _LAST_WORDS_S):
            rank = next(rank for rank, one in self._pipes.items() if one is pipe)
            if rank not in self.lost:
                self._hear(rank)
        return "; ".join(f"rank {rank}: {words}" for rank, words in sorted(self.lost.items()))

    def end(self, farewell: bytes, patience_s: float) -> None:
        """Tell every process `farewell`, and kill those that have not ended after `patience_s`."""
        for rank, pipe in self._pipes.items():
            if self._room[rank].poll(0):
                with suppress(OSError):
                    pipe.send_bytes(farewell)
        end = time.monotonic() + patience_s
        for child in self._children.values():
            child.join(max(0.0, end - time.monotonic()))
            if child.is_alive():
                child.kill()
                child.join(_LAST_WORDS_S)  # one that is stuck in the driver of a GPU that failed does not end
        for pipe in self._pipes.values():
            self._said.unregister(pipe)
            pipe.close()
        self._pipes.clear()
        self._room.clear()
        self._children.clear()

    def _hear(self, rank: int) -> None:
        """Take in what `rank`, whose pipe is ready, has to say: little enough to have come in one piece."""
        try:
            words = self._pipes[rank].recv_bytes()
        except (EOFError, OSError):
            child = self._children[rank]
            child.join(_LAST_WORDS_S)
            self.lost[rank] = f"its process (pid {child.pid}) ended with exit code {child.exitcode}"
            return
        if words == DONE:
            self._done.add(rank)
        else:
            self.lost[rank] = words.decode(errors="replace")
