"""The worker side's background thread: it alone talks to daemons and posts writes, so no engine step ever waits for either.

The engine thread hands it commands through a queue; the thread polls daemon sockets and transfers. A peer that is slow, dead or
hostile costs its own handoffs their deadlines and nobody else anything.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from connector.handoffs import Outgoing, Pending
from connector.peers import Peers
from handoff.claim import SignedClaim
from handoff.messages import Abort, Hello, Sent, Stopped
from handoff.transport import Progress, Region, Transport, TransportError

logger = logging.getLogger(f"vllm.anchorleg.{__name__}")  # below vLLM's own logger, so that its settings hold

_BUSY_POLL_S = 0.0002  # while writes are in flight; a block of SmolLM2 takes about as long
_IDLE_POLL_MS = 1000
_REMIND_S = 1.0  # after which a daemon that has not answered is asked again


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Where this rank's KV cache lies: for each layer, in execution order, its region and the bytes from block to block."""

    layers: tuple[Region, ...]
    block_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """Deadlines in seconds."""

    accept: float
    write: float


@dataclass(frozen=True, slots=True)
class Counters:
    """Called by the thread; the worker side wires them to metrics."""

    sent: Callable[[int, float], None]  # bytes, seconds from first post to last completion
    failed: Callable[[str], None]  # reason


class Sender:
    """Owns the transport, the daemon sockets and every handoff this rank takes part in."""

    def __init__(
        self,
        *,
        transport: Transport,
        memory: CacheMemory,
        hello: Hello,
        identity: bytes,
        limits: SenderLimits,
        counters: Counters,
    ) -> None:
        transport.register(memory.layers)
        self._transport = transport
        self._memory = memory
        self._limits = limits
        self._counters = counters
        self._context = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._peers = Peers(self._context, transport, hello, identity, self._poller)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, zmq.POLLIN)
        self._outgoing: dict[str, Outgoing] = {}
        self._quiet = threading.Condition()  # guards _settled; notified when a handoff becomes quiescent
        self._settled: set[str] = set()
        self._stop = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="anchorleg-sender", daemon=True)
        self._thread.start()

    # Called from the engine's thread.

    def open(self, request_id: str, claim: SignedClaim, prompt_tokens: int) -> None:
        """Ask the claim's daemon for its landing region."""
        with self._quiet:
            self._settled.discard(request_id)
        self._tell(lambda: self._on_open(request_id, claim, prompt_tokens))

    def write(
        self,
        request_id: str,
        first_block: int,
        blocks: tuple[int, ...],
        *,
        last: bool,
        ready: Callable[[], bool],
        layers: range | None = None,
    ) -> None:
        """Write blocks of some layers (None: of all) as soon as `ready()`: what fills them has run on the device.

        `last`: everything else of this request has been given before. Then `layers` may be empty.
        """
        self._tell(lambda: self._on_write(request_id, Pending(first_block, blocks, last, ready, layers)))

    def withdraw(self, request_id: str) -> None:
        """Send no more of this request; the scheduler side tells the daemon why."""
        self._tell(lambda: self._on_withdraw(request_id))

    def settled(self, request_ids: set[str]) -> set[str]:
        """Return those of the ids of which no write is or will be in flight."""
        if not self._thread.is_alive():
            return set(request_ids)
        with self._quiet:
            return request_ids & self._settled

    def forget(self, request_ids: set[str]) -> None:
        """vLLM has been told that these are settled."""
        with self._quiet:
            self._settled -= request_ids

    def wait_settled(self, request_ids: set[str], timeout: float) -> bool:
        """Wait until all ids are settled; False if that takes longer than `timeout` seconds."""
        with self._quiet:
            return self._quiet.wait_for(lambda: request_ids <= self._settled or not self._thread.is_alive(), timeout)

    def wait_for_any(self, request_ids: set[str], timeout: float) -> None:
        """Return when one of the ids is settled, or after `timeout` seconds."""
        with self._quiet:
            self._quiet.wait_for(lambda: bool(request_ids & self._settled) or not self._thread.is_alive(), timeout)

    def close(self) -> None:
        """Stop the thread and release transport and sockets; idempotent."""
        self._tell(self._request_stop)
        self._thread.join(timeout=5.0)
        if not self._closed and not self._thread.is_alive():
            self._closed = True
            os.close(self._wake)

    # Called in the thread.

    def _tell(self, command: Callable[[], None]) -> None:
        if not self._closed:
            self._commands.put(command)
            os.eventfd_write(self._wake, 1)

    def _request_stop(self) -> None:
        self._stop = True

    def _run(self) -> None:
        try:
            while not self._stop:
                self._guard(self._turn)
        finally:
            self._peers.close()
            self._transport.close()
            self._context.term()

    def _turn(self) -> None:
        busy = any(outgoing.busy for outgoing in self._outgoing.values())
        events = dict(self._poller.poll(0 if busy else self._idle_ms()))
        if busy and not events:
            time.sleep(_BUSY_POLL_S)  # a transfer has no file descriptor to wait on
        if self._wake in events:
            os.eventfd_read(self._wake)
        while not self._commands.empty():
            self._guard(self._commands.get_nowait())
        for socket in self._peers.sockets():
            if socket in events:
                self._guard(lambda socket=socket: self._peers.receive(socket, self._outgoing))  # type: ignore[misc]
        for outgoing in list(self._outgoing.values()):
            self._guard(lambda outgoing=outgoing: self._advance(outgoing))  # type: ignore[misc]

    def _idle_ms(self) -> int:
        deadlines = [outgoing.deadline for outgoing in self._outgoing.values() if outgoing.deadline is not None]
        if not deadlines:
            return _IDLE_POLL_MS
        return max(1, min(_IDLE_POLL_MS, round((min(deadlines) - time.monotonic()) * 1000)))

    def _guard(self, action: Callable[[], None]) -> None:
        # One request's surprise must not end the thread that serves all of them.
        try:
            action()
        except Exception:
            logger.exception("the sender met an error it does not know; other handoffs go on")
            self._counters.failed("internal")

    def _on_open(self, request_id: str, claim: SignedClaim, prompt_tokens: int) -> None:
        now = time.monotonic()
        outgoing = Outgoing(request_id, claim, prompt_tokens, deadline=now + self._limits.accept, remind_at=now + _REMIND_S)
        self._outgoing[request_id] = outgoing
        self._peers.begin(outgoing, self._outgoing)

    def _on_write(self, request_id: str, pending: Pending) -> None:
        outgoing = self._outgoing.get(request_id)
        if outgoing is not None and not outgoing.ended:
            outgoing.pending.append(pending)

    def _on_withdraw(self, request_id: str) -> None:
        outgoing = self._outgoing.get(request_id)
        if outgoing is not None:
            outgoing.withdraw("withdrawn by vLLM")

    def _advance(self, outgoing: Outgoing) -> None:
        try:
            self._post(outgoing)
            self._reap(outgoing)
        except TransportError as error:
            outgoing.withdraw(str(error), doubtful=True)
        except Exception as error:
            logger.exception("handoff %s", outgoing.handoff_id)
            outgoing.withdraw(f"internal error: {error}")
        if outgoing.deadline is not None and time.monotonic() > outgoing.deadline:
            reason = "the daemon did not answer in time" if outgoing.address is None else "a write took too long"
            outgoing.withdraw(reason, doubtful=True)
            outgoing.deadline = None
            outgoing.abandon(list(outgoing.transfers))
        if outgoing.ended and not outgoing.transfers:
            self._settle(outgoing)
        elif outgoing.address is None and time.monotonic() > outgoing.remind_at:
            outgoing.remind_at = time.monotonic() + _REMIND_S
            self._peers.remind(outgoing)

    def _post(self, outgoing: Outgoing) -> None:
        peer = outgoing.peer
        while peer is not None and outgoing.address is not None and outgoing.pending and outgoing.pending[0].ready():
            pending = outgoing.pending.pop(0)
            pieces = outgoing.pieces(pending, self._memory.layers, self._memory.block_bytes)
            if pieces:
                outgoing.started = outgoing.started or time.monotonic()
                try:
                    outgoing.transfers.append(self._transport.write(peer, pieces, self._memory.layers[0]))
                except TransportError:
                    outgoing.abandoned = True  # some pieces may have been posted before the one that failed
                    raise
                outgoing.deadline = time.monotonic() + self._limits.write
            outgoing.count(pending, pieces)

    def _reap(self, outgoing: Outgoing) -> None:
        for transfer in list(outgoing.transfers):
            try:
                done = transfer.poll() is Progress.DONE
            except TransportError:
                outgoing.abandon([transfer])
                raise
            if done:
                outgoing.transfers.remove(transfer)
                transfer.close()
        if not outgoing.transfers and outgoing.address is not None and not outgoing.ended:
            outgoing.deadline = None  # the next chunk's forward takes as long as it takes
            if outgoing.complete:
                outgoing.ended = True

    def _settle(self, outgoing: Outgoing) -> None:
        del self._outgoing[outgoing.request_id]
        try:
            self._say_last(outgoing)
        finally:
            with self._quiet:
                self._settled.add(outgoing.request_id)
                self._quiet.notify_all()
        if outgoing.doubtful:
            address = outgoing.peer_address
            self._peers.distrust(address, needed=any(other.peer_address == address for other in self._outgoing.values()))

    def _say_last(self, outgoing: Outgoing) -> None:
        claim = outgoing.claim.claim
        if outgoing.failure is None:
            sent = Sent(claim.handoff_id, claim.epoch, outgoing.prompt_tokens, outgoing.blocks, outgoing.bytes)
            self._peers.send(outgoing, sent)
            self._counters.sent(outgoing.bytes, time.monotonic() - (outgoing.started or time.monotonic()))
        elif not (outgoing.cancelled or outgoing.rejected):
            self._peers.send(outgoing, Abort(outgoing.claim, outgoing.failure, writing=outgoing.abandoned))
        elif outgoing.cancelled and not outgoing.abandoned:
            self._peers.send(outgoing, Stopped(claim.handoff_id, claim.epoch))
        if outgoing.failure is not None:
            logger.warning("handoff %s: %s", claim.handoff_id, outgoing.failure)
            self._counters.failed("cancelled" if outgoing.cancelled else "failed")


def device_ready(device_type: str) -> Callable[[], bool]:
    """Return a check that work queued on the device so far has run; on a CPU it already has."""
    if device_type != "cuda":
        return lambda: True
    import torch

    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return lambda: bool(event.query())
