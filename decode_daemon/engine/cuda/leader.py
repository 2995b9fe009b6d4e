"""Rank 0's side of a step that several GPUs compute: the other ranks' processes, and what they are told.

Every wait is bounded and ends early when a rank is lost; whatever is lost, everything ends, and every later call says why.
"""

import multiprocessing
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import torch

from decode_daemon.engine.cuda import caches
from decode_daemon.engine.cuda.buckets import Bucket
from decode_daemon.engine.cuda.follower import DONE, Task, Verb, follow, message
from decode_daemon.engine.cuda.graphs import Event, Replayable
from decode_daemon.engine.cuda.group import PATIENCE_S, Group, meeting_place
from decode_daemon.engine.cuda.shards import Shard, assembled, check_divisible, named
from decode_daemon.engine.cuda.step import Step
from decode_daemon.engine.protocol import EngineError, EngineLostError
from decode_daemon.engine.weights import Weights

_START_S = 300.0  # for a rank to compile and capture its kernels, and for the slowest to read its weights
_LAST_WORDS_S = 2.0  # for a lost rank's process to end, once its silence is known
_FAREWELL_S = 5.0
_GLANCE_S = 0.001  # between two looks at the others while the GPU is waited for
_SPIN_S = 0.05  # of waiting without pause: a step's usual time


class Leader:
    """Owns the processes of ranks 1 and on, and the graphs of rank 0, which end before the group does. Not thread-safe."""

    def __init__(self, task: Task, ranks: int, device: torch.device) -> None:
        """Start a process for each other rank, on the devices that follow `device`, and meet them.

        Raises EngineError where `ranks` do not divide the model, or when a rank does not come.
        """
        check_divisible(task.config, ranks)
        self.graphs: dict[tuple[int, Bucket], Replayable] = {}
        self._task = task
        self._shards = [Shard(rank, ranks, task.config) for rank in range(ranks)]
        self._failed: EngineError | None = None
        self._group: Group | None = None
        self._children: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        self._said = select.poll()  # of the pipes
        self._done: set[int] = set()  # ranks that have said so of the present stage of the start
        self._lost: dict[int, str] = {}  # last words, or how the process ended, by rank
        self._asked = False  # whether somebody may have written to the whole cache since the others were told of it
        self._next = 0, 1  # position and rows of the next step
        self._written: range | None = None  # positions of which the whole cache lacks the other ranks' KV
        store = meeting_place(ranks)
        # When this process ends, before multiprocessing waits for the children.
        self._at_exit = util.Finalize(None, self.close, exitpriority=0)
        try:
            self._spawn(ranks, device, store.port)
            self.all_done()
            self._group = self._joined(lambda: Group.join(0, ranks, device, store))
        except BaseException:
            self.close()
            raise

    @property
    def shard(self) -> Shard:
        """Rank 0's part."""
        return self._shards[0]

    def step(self, weights: Weights) -> Step:
        """Give every rank its part of `weights`, and return rank 0's step. Raises torch.OutOfMemoryError, EngineError."""
        group, parts = self._together, {}
        with self._watched(starting=True):
            for layer, field, tensor in named(weights):
                whole = tensor.to(group.device).contiguous()  # cut where that is quick
                own, *others = (shard.cut(field, whole) for shard in self._shards)
                for pipe, part in zip(self._pipes, others, strict=True):
                    pipe.send((layer, field, tuple(part.shape), part.dtype))
                group.scatter(others)
                parts[layer, field] = own
            for pipe in self._pipes:
                pipe.send(None)
            return self._task.step(group, assembled(parts, self.shard))

    def all_done(self) -> None:
        """Wait until every other rank has said that it is done with a stage of its start."""
        end = time.monotonic() + _START_S
        while missing := set(range(1, len(self._shards))) - self._done:
            self.look()
            if time.monotonic() > end:
                raise self._failure(f"ranks {sorted(missing)} have not started within {_START_S:.0f} s")
            self._said.poll(1000 * _GLANCE_S)
        self._done.clear()

    def feed(self, ids: Sequence[int], position: int, cache: torch.Tensor) -> None:
        """Tell the others the next step's `ids`, and first what was written to the whole `cache` before `position`."""
        if self._asked:
            self._send(Verb.TAKE_KV, 0, position)
            with self._watched():
                caches.give(self._together, self._shards[1:], cache, range(position))
            self._asked = False
        self._send(Verb.FEED, position, len(ids), ids)
        self._next = position, len(ids)

    def queue(self, width: int, bucket: Bucket) -> None:
        """Queue the step of `width` (padded) rows on every rank."""
        self._send(Verb.QUEUE, width, bucket.tokens)
        with self._watched():
            self.graphs[width, bucket].replay()
        position, rows = self._next
        end = min(position + rows, self._task.context_tokens)
        before = self._written or range(position, end)
        self._written = range(min(before.start, position), max(before.stop, end))
        self._next = end, rows

    def logits(self, step: Step, rows: int) -> torch.Tensor:
        """Return the last step's logits, [rows, vocab], when they are there."""
        assert step.join is not None
        self._send(Verb.LOGITS, rows)
        with self._watched():
            whole = step.join.logits(step.logits[:rows])
        self.wait()
        return whole

    def share(self, cache: torch.Tensor) -> None:
        """Bring into the whole `cache` what other ranks' heads wrote; somebody may write to it now."""
        self._asked = True
        if self._written is None:
            self.look()
            return
        self._send(Verb.GIVE_KV, self._written.start, self._written.stop)
        with self._watched():
            caches.take(self._together, self._shards[1:], cache, self._written)
        self._written = None
        self.wait()

    def wait(self, event: Event | None = None, seconds: float = PATIENCE_S) -> None:
        """Wait for `event`, or for all that rank 0 has queued. Raises EngineError when a rank is lost, or takes too long."""
        if event is None:
            if self._together.device.type == "cpu":
                return
            event = recorded()
        began = looked = time.monotonic()
        while not event.query():
            now = time.monotonic()
            if now - looked < _GLANCE_S:
                continue
            self.look()
            if now - began > seconds:
                raise self._failure(f"what the ranks were asked to compute is not there after {seconds:.0f} s")
            if now - began > _SPIN_S:
                time.sleep(_GLANCE_S)
            looked = now

    def wait_for_start(self) -> None:
        """As `wait`, for what a rank may first have to compile."""
        self.wait(seconds=_START_S)

    def look(self) -> None:
        """Raise EngineError when a rank is lost, or has said that something went wrong."""
        if self._failed is not None:
            raise self._failed
        for number, _ in self._said.poll(0):
            self._hear(next(rank for rank, pipe in enumerate(self._pipes, 1) if pipe.fileno() == number))
        if self._lost:
            raise self._failure()

    def close(self) -> None:
        """End the other ranks' processes and leave the group; more calls do nothing."""
        self._end(EngineError("this tensor-parallel engine is closed"), _FAREWELL_S)

    @property
    def _together(self) -> Group:
        if self._group is None:
            raise self._failed or EngineError("the ranks of this engine have not met")
        return self._group

    def _spawn(self, ranks: int, device: torch.device, port: int) -> None:
        context = multiprocessing.get_context("spawn")  # what CUDA has begun in this process, a fork could not go on with
        for rank in range(1, ranks):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            self._said.register(ours, select.POLLIN)
            name = f"anchorleg rank {rank}"
            wanted = (rank, ranks, beside(device, rank), port, self._task, theirs)
            child = context.Process(target=follow, args=wanted, name=name, daemon=True)
            with theirs:  # so that only the child has it, and its end is the pipe's
                child.start()
            self._children.append(child)

    def _joined(self, meet: Callable[[], Group]) -> Group:
        """Return what `meet` returns, which may never end when a rank is lost: it has a thread to wait in."""
        met: list[Group] = []
        errors: list[RuntimeError] = []

        def attend() -> None:
            try:
                met.append(meet())
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=attend, name="join group", daemon=True)
        thread.start()
        end = time.monotonic() + _START_S
        while thread.is_alive() and time.monotonic() < end:
            thread.join(_GLANCE_S)
            self.look()
        if met:
            return met[0]
        raise self._failure(str(errors[0]) if errors else f"the ranks have not met within {_START_S:.0f} s")

    def _send(self, verb: Verb, first: int, second: int = 0, ids: Sequence[int] = ()) -> None:
        if self._failed is not None:
            raise self._failed
        told = message(verb, first, second, ids)
        with self._watched():
            for pipe in self._pipes:
                pipe.send_bytes(told)

    @contextmanager
    def _watched(self, *, starting: bool = False) -> Iterator[None]:
        """What fails in a collective, or for want of another rank, is told with that rank's name.

        Later than the start, too little memory is such a failure too: the others wait for what rank 0 did not come to queue.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            if starting:
                raise
            raise self._failure(f"rank 0: {error}") from error
        except (RuntimeError, OSError, EOFError) as error:
            raise self._failure(f"rank 0: {type(error).__name__}: {error}") from error

    def _failure(self, seen: str = "a rank is lost") -> EngineError:
        """End everything; return the error that names the lost ranks and their last words, or else what was `seen`."""
        ready = connection.wait(self._pipes, 0 if self._lost else _LAST_WORDS_S)
        for rank, pipe in enumerate(self._pipes, 1):
            if pipe in ready and rank not in self._lost:
                self._hear(rank)
        words = "; ".join(f"rank {rank}: {words}" for rank, words in sorted(self._lost.items())) or seen
        error = EngineLostError(f"tensor parallelism over {len(self._shards)} ranks failed: {words}. Restart the daemon")
        self._end(error, 0.0)
        return error

    def _hear(self, rank: int) -> None:
        """Take in what `rank`, whose pipe is ready, has to say."""
        try:
            words = self._pipes[rank - 1].recv_bytes()
        except (EOFError, OSError):
            child = self._children[rank - 1]
            child.join(_LAST_WORDS_S)
            self._lost[rank] = f"its process (pid {child.pid}) ended with exit code {child.exitcode}"
            return
        if words == DONE:
            self._done.add(rank)
        else:
            self._lost[rank] = words.decode(errors="replace")

    def _end(self, why: EngineError, patience_s: float) -> None:
        if self._failed is None:
            self._failed = why
        self._at_exit.cancel()
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(message(Verb.STOP))
        end = time.monotonic() + patience_s
        for child in self._children:
            child.join(max(0.0, end - time.monotonic()))
            if child.is_alive():
                child.kill()
                child.join(_LAST_WORDS_S)  # one that is stuck in the driver of a GPU that failed does not end
        for pipe in self._pipes:
            self._said.unregister(pipe)
            pipe.close()
        self._pipes.clear()
        self._children.clear()
        self.graphs.clear()
        if self._group is not None:
            self._group.leave()
            self._group = None


def recorded() -> Event:
    """Return an event after all that is queued on the current stream."""
    event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def beside(device: torch.device, rank: int) -> torch.device:
    """Return the device of `rank`, when rank 0 has `device`."""
    if device.type == "cpu" or rank == 0:
        return device
    return torch.device(device.type, ((device.index or 0) + rank) % torch.cuda.device_count())
