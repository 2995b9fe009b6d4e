"""Rank 0's side of a step that several GPUs compute: the other ranks' processes, and what they are told.

Every wait is bounded and ends early when a rank is lost; whatever is lost, everything ends, and every later call says why.
"""

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import util

import torch

from decode_daemon.engine.cuda import caches
from decode_daemon.engine.cuda.buckets import Bucket
from decode_daemon.engine.cuda.follower import START_S, Task, Verb, follow, message
from decode_daemon.engine.cuda.graphs import Event, Replayable
from decode_daemon.engine.cuda.group import PATIENCE_S, Group, meeting_place
from decode_daemon.engine.cuda.others import Others
from decode_daemon.engine.cuda.shards import Shard, assembled, check_divisible, named
from decode_daemon.engine.cuda.step import Step
from decode_daemon.engine.cuda.waiting import GLANCE_S, computed, recorded
from decode_daemon.engine.protocol import EngineError, EngineLostError
from decode_daemon.engine.weights import Weights

_FAREWELL_S = 5.0
_START_AGAIN = (
    "The engine has not started: see with nvidia-smi that every GPU of CUDA_VISIBLE_DEVICES works and has its memory free, "
    "then start again; tensor_parallel 1 needs one GPU only"
)
_RESTART = "Restart the daemon"


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
        self._others = Others()
        self._ready = False
        self._asked = False  # whether somebody may have written to the whole cache since the others were told of it
        self._next = 0, 1  # position and rows of the next step
        self._written: range | None = None  # positions of which the whole cache lacks the other ranks' KV
        store = meeting_place(ranks)
        # When this process ends, before multiprocessing waits for the children.
        self._at_exit = util.Finalize(None, self.close, exitpriority=0)
        try:
            for rank in range(1, ranks):
                self._others.start(rank, follow, ranks, beside(device, rank), store.port, task)
            self._over("begun")
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
                for rank, part in enumerate(others, 1):
                    self._tell(rank, pickle.dumps((layer, field, tuple(part.shape), part.dtype)), START_S)
                group.scatter(others)
                self.wait(seconds=START_S)  # the next copy to the GPU would wait for it without a bound
                parts[layer, field] = own
            for shard in self._shards[1:]:
                self._tell(shard.rank, pickle.dumps(None), START_S)
            return self._task.step(group, assembled(parts, self.shard))

    def all_done(self) -> None:
        """Wait until every other rank has said that it is ready for steps."""
        self._over("become ready")
        self._ready = True

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
            event = recorded(self._together.device)
        if not computed(event, seconds, self.look):
            raise self._failure(f"what the ranks were asked to compute is not there after {seconds:.0f} s")

    def wait_for_start(self) -> None:
        """As `wait`, for what a rank may first have to compile."""
        self.wait(seconds=START_S)

    def look(self) -> None:
        """Raise EngineError when a rank is lost, or has said that something went wrong."""
        if self._failed is not None:
            raise self._failed
        if self._others.heard():
            raise self._failure()

    def close(self) -> None:
        """End the other ranks' processes and leave the group; more calls do nothing."""
        self._end(EngineError("this tensor-parallel engine is closed"), _FAREWELL_S)

    @property
    def _together(self) -> Group:
        if self._group is None:
            raise self._failed or EngineError("the ranks of this engine have not met")
        return self._group

    def _over(self, stage: str) -> None:
        """Wait until every other rank has said that a stage of its start is over."""
        end = time.monotonic() + START_S
        while missing := self._others.missing():
            self.look()
            if time.monotonic() > end:
                ranks = ", ".join(map(str, missing))
                raise self._failure(f"of rank {ranks} the process has not {stage} within {START_S:.0f} s")
            self._others.heard(GLANCE_S)

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
        end = time.monotonic() + START_S
        while thread.is_alive() and time.monotonic() < end:
            thread.join(GLANCE_S)
            self.look()
        if met:
            return met[0]
        raise self._failure(str(errors[0]) if errors else f"the ranks have not met within {START_S:.0f} s")

    def _send(self, verb: Verb, first: int, second: int = 0, ids: Sequence[int] = ()) -> None:
        if self._failed is not None:
            raise self._failed
        told = message(verb, first, second, ids)
        with self._watched():
            for shard in self._shards[1:]:
                self._tell(shard.rank, told, PATIENCE_S)

    def _tell(self, rank: int, words: bytes, seconds: float) -> None:
        try:
            self._others.tell(rank, words, seconds)
        except TimeoutError as error:
            raise self._failure(f"rank {rank} {error}") from error

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
        words = self._others.last_words() or seen
        kind, way_out = (EngineLostError, _RESTART) if self._ready else (EngineError, _START_AGAIN)
        error = kind(f"tensor parallelism over {len(self._shards)} ranks failed: {words}. {way_out}")
        self._end(error, 0.0)
        return error

    def _end(self, why: EngineError, patience_s: float) -> None:
        if self._failed is None:
            self._failed = why
        self._at_exit.cancel()
        self._others.end(message(Verb.STOP), patience_s)
        self.graphs.clear()
        if self._group is not None:
            self._group.leave()
            self._group = None


def beside(device: torch.device, rank: int) -> torch.device:
    """Return the device of `rank`, when rank 0 has `device`."""
    if device.type == "cpu" or rank == 0:
        return device
    return torch.device(device.type, ((device.index or 0) + rank) % torch.cuda.device_count())
