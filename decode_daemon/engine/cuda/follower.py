"""A process of ranks 1 and on: computes, on its own GPU, its part of every step that rank 0 queues.

It is told what to queue in messages of one small size, and queues it without waiting for its GPU: it is as far ahead as rank 0
is. It learns no token that rank 0 did not choose; greedy steps find theirs themselves, each rank the same one.
"""

import os
import signal
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from typing import Any

import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda import caches
from decode_daemon.engine.cuda.buckets import MAX_WIDTH
from decode_daemon.engine.cuda.graphs import captured, tell
from decode_daemon.engine.cuda.group import Group, meet
from decode_daemon.engine.cuda.join import Join
from decode_daemon.engine.cuda.plan import Plan
from decode_daemon.engine.cuda.shards import Shard, assembled
from decode_daemon.engine.cuda.step import Step
from decode_daemon.engine.cuda.tiled import Tiled
from decode_daemon.engine.weights import Weights

START_S = 300.0  # that a rank is waited for to begin, to give or take weights, and to compile and capture its kernels
_MOST_WORDS = 4096  # bytes, which one write puts into a pipe: what is there can be read without waiting
DONE = b""  # what a follower says when a stage of its start is over; anything else is what went wrong, in UTF-8
_MESSAGE = struct.Struct(f"<{3 + MAX_WIDTH}q")


class Verb(IntEnum):
    """What rank 0 wants queued, and what the two numbers beside it are."""

    FEED = 0  # position, rows; then the rows' ids
    QUEUE = 1  # width, bucket's tokens
    LOGITS = 2  # rows
    TAKE_KV = 3  # first position, end
    GIVE_KV = 4  # first position, end
    STOP = 5


@dataclass(frozen=True, slots=True)
class Task:
    """What all ranks compute, each its part."""

    config: LlamaConfig
    context_tokens: int
    widths: tuple[int, ...]
    overlap: bool
    plan: Plan

    def step(self, group: Group, weights: Weights) -> Step:
        """Return the step of the group's rank, whose part `weights` are."""
        shard = Shard(group.rank, group.ranks, self.config)
        splits = self.plan.attention.buckets(self.context_tokens, shard.config.kv_heads, shard.config.head_dim)[-1].splits
        join = Join(group, shard, overlap=self.overlap)
        return Step(
            *(shard.config, weights, self.context_tokens, splits),
            Tiled(self.config.rms_eps, overlap=self.overlap, plan=self.plan, why="several GPUs compute them"),
            overlap=self.overlap,
            plan=self.plan,
            join=join,
        )


def message(verb: Verb, first: int = 0, second: int = 0, ids: Sequence[int] = ()) -> bytes:
    """Return the message that asks for `verb`."""
    return _MESSAGE.pack(verb, first, second, *ids, *(0,) * (MAX_WIDTH - len(ids)))


def follow(rank: int, ranks: int, device: torch.device, port: int, task: Task, pipe: Connection) -> None:
    """Be rank `rank`: the whole life of its process, which ends when rank 0 says so, closes `pipe` or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both reach every process of a daemon, which then has answers to finish
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    code = 1
    try:
        pipe.send_bytes(DONE)
        group = Group.join(rank, ranks, device, meet(port, ranks))
        _Follower(group, task, pipe).serve()
        code = 0
    except EOFError:
        code = 0
    except BaseException as error:  # noqa: BLE001 - rank 0 says it; this process ends
        words = f"{type(error).__name__}: {error}".encode()[:_MOST_WORDS]
        try:
            pipe.send_bytes(words)
        except OSError:
            code = 2
    finally:
        # A collective that nobody else comes to any more would keep an orderly end waiting.
        os._exit(code)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
    os._exit(3)


class _Follower:
    def __init__(self, group: Group, task: Task, pipe: Connection) -> None:
        self._group, self._pipe = group, pipe
        self._shard = Shard(group.rank, group.ranks, task.config)
        self._step = task.step(group, self._weights())
        own = self._shard.config
        buckets = task.plan.attention.buckets(task.context_tokens, own.kv_heads, own.head_dim)
        self._graphs = {
            (width, bucket.tokens): captured(self._step, width, bucket, lambda: torch.cuda.synchronize(group.device))
            for width in task.widths
            for bucket in buckets
        }
        pipe.send_bytes(DONE)

    @torch.inference_mode()
    def serve(self) -> None:
        """Queue what rank 0 asks for, until it asks to stop or is gone: it may have nothing to ask for days."""
        step = self._step
        while True:
            verb, first, second, *ids = _MESSAGE.unpack(self._pipe.recv_bytes(_MESSAGE.size))
            if verb == Verb.QUEUE:
                self._graphs[first, second].replay()
            elif verb == Verb.FEED:
                tell(step, torch.tensor(ids[:second]), first)
            elif verb == Verb.LOGITS:
                assert step.join is not None
                step.join.logits(step.logits[:first])
            elif verb == Verb.TAKE_KV:
                caches.taken(self._group, self._shard, step.cache, range(first, second))
            elif verb == Verb.GIVE_KV:
                caches.given(self._group, self._shard, step.cache, range(first, second))
            else:
                return

    def _weights(self) -> Weights:
        """Receive this rank's weights: for each a message (layer, field, shape, dtype), then what it holds; None at the end."""
        parts = {}
        while (told := self._told()) is not None:
            layer, field, shape, dtype = told
            part = torch.empty(shape, dtype=dtype, device=self._group.device)
            self._group.receive(part)
            parts[layer, field] = part
        return assembled(parts, self._shard)

    def _told(self) -> Any:
        """Return rank 0's next message of the start."""
        if not self._pipe.poll(START_S):
            raise TimeoutError(f"rank 0 has not gone on with the weights within {START_S:.0f} s")
        return self._pipe.recv()
