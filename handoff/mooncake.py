"""Mooncake: one-sided writes over TCP, each acknowledged once its bytes are in the target's memory."""

import atexit
import threading
import time
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import msgspec

from handoff.mooncake_engine import cut_connections, load_engines, numeric, register_region, start_engine, wake_engine
from handoff.transport import Peer, Piece, Progress, Region, TransportError

_CONNECT_S = 5.0  # also Mooncake's own limit for the TCP connection
_CLOSE_S = 2.0
_MAX_OPENING = 64  # threads that open peers
_MAX_POSTED = 1024  # pieces at a time for one peer


class MooncakeTransport:
    """Mooncake's transfer engine: protocol tcp, peers introduced by its own handshake (P2PHANDSHAKE). Host memory only.

    What is its way, in mooncake-transfer-engine-non-cuda 0.3.13, and what is done about it here:

    - It asks nobody who they are: whoever reaches an engine's port may read and write what is registered there. Keep the ports
      in a network of your own. An end that only writes registers nothing with an engine: TCP reads sources as they are.
    - An engine listens on all interfaces, on two ports that it picks between 15000 and 17000 (MC_MIN_RPC_PORT,
      MC_MAX_RPC_PORT), and writers send their data to the address that it was told at its start: `host`. One of the two stays
      taken for a minute after its end: leave it more than a few to pick from.
    - Opening a peer can take a minute (one that is stopped accepts and does not answer), and holds a lock that all writes
      need. So each peer has an engine of its own (0.5 ms, two threads, five descriptors), opened in a thread whose connection
      is cut after five seconds. A thread that came back from there while Python ends would abort the process.
    - An engine connects again by itself. What answers then may be another process: one failure ends the connection.
    - The destructor holds the GIL while it joins a thread that looks up once a second: see `wake_engine`.
    - Each piece takes a connection of its own, made while the caller waits, unless MC_TCP_ENABLE_CONNECTION_POOL is set: it is
      set here. The first write to a peer makes those connections.
    - 2,048 pieces may wait for one peer, and those beyond 1,024 for a second only: no more than 1,024 are posted at a time.
    - It takes RDMA where it finds a device, whatever protocol it was told: it is told a device that does not exist.
    - It takes IPv6 addresses with MC_USE_IPV6=1 only, set at both ends.
    - It logs to stderr, by default each start of an engine: MC_LOG_LEVEL is ERROR here unless set. It says "Local segment
      descriptor not found" once an engine all the same.
    """

    name = "mooncake"

    def __init__(self, label: str, *, host: str | None = None) -> None:
        """Load the library and, with a `host` that peers reach this process at, listen. Raises TransportError.

        Without one it listens from the first `metadata()` on, for peers on this machine.
        """
        self._api = load_engines()
        self._label = f"{label}-{uuid.uuid4().hex[:12]}"
        self._host = host or "127.0.0.1"
        self._engine: Any = None if host is None else start_engine(self._api, host)  # what peers write through
        self._registered: dict[Region, None] = {}
        self._sources = _Extents(())
        self._connections: dict[Peer, _Connection] = {}
        self._openings = threading.Semaphore(_MAX_OPENING)
        self._closed = False
        atexit.register(self.close)

    def register(self, regions: Sequence[Region]) -> None:
        """See Transport."""
        for region in regions:
            if region in self._registered:
                continue
            if region.device is not None:
                raise TransportError(f"Mooncake cannot register {region}: over TCP it reaches host memory only; use nixl")
            if self._engine is not None:
                register_region(self._engine, region)
            self._registered[region] = None
        self._sources = _Extents(self._registered)

    def unregister(self, regions: Sequence[Region]) -> None:
        """See Transport. Writes that begin later are refused, those of connected peers too."""
        for region in regions:
            if region in self._registered:
                del self._registered[region]
                if self._engine is not None:
                    self._engine.unregister_memory(region.address)
        self._sources = _Extents(self._registered)

    def metadata(self) -> bytes:
        """See Transport. Raises TransportError where it listens only now and cannot."""
        self._require_open()
        if self._engine is None:
            engine = start_engine(self._api, self._host)
            for region in tuple(self._registered):  # a slot's memory may be renewed in another thread meanwhile
                register_region(engine, region)
            self._engine = engine
        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"{host}:{self._engine.get_rpc_port()}"
        return msgspec.json.encode(
            _Metadata(self._label, address, tuple((r.address, r.length) for r in tuple(self._registered)))
        )

    def connect(self, metadata: bytes) -> Peer:
        """See Transport. Returns at once: what is written meanwhile waits for the connection, and fails where that does."""
        self._require_open()
        try:
            found = msgspec.json.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as error:
            raise TransportError(f"Mooncake cannot connect to the peer: its metadata is none ({error})") from error
        peer = Peer(found.label)
        connection = self._connections.get(peer)
        if connection is None or connection.failure is not None:
            self.disconnect(peer)
            if not self._openings.acquire(blocking=False):
                raise TransportError(f"Mooncake cannot connect to {peer}: {_MAX_OPENING} others do not answer")
            try:
                connection = self._connections[peer] = _Connection(self._api, peer, found.address, self._openings)
            except RuntimeError as error:  # no thread can be started
                self._openings.release()
                raise TransportError(f"Mooncake cannot connect to {peer}: {error}") from error
        connection.targets = _Extents(Region(address, length) for address, length in found.regions)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """See Transport. Writes that are in flight end here, and no source is read after that."""
        connection = self._connections.pop(peer, None)
        if connection is not None:
            connection.close()

    def write(self, peer: Peer, pieces: Sequence[Piece], source: Region) -> "_MooncakeTransfer":
        """See Transport."""
        connection = self._connections.get(peer)
        if connection is None:
            raise TransportError(f"Mooncake cannot write to {peer}: it is not connected")
        for piece in pieces:
            if not self._sources.hold(piece.local, piece.length):
                raise TransportError(f"Mooncake cannot write to {peer}: {piece} comes from memory that is not registered here")
            if not connection.targets.hold(piece.remote, piece.length):
                raise TransportError(f"Mooncake cannot write to {peer}: {piece} goes to memory that is not registered there")
        transfer = _MooncakeTransfer(connection, pieces)
        transfer.post()
        return transfer

    def nudge(self) -> None:
        """See Transport. Mooncake's own threads take part."""

    def close(self) -> None:
        """See Transport."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        deadline = time.monotonic() + _CLOSE_S
        for peer in list(self._connections):
            self.disconnect(peer)
        self.unregister(list(self._registered))
        if self._engine is not None:
            wake_engine(self._engine)
            self._engine = None
        for _ in range(_MAX_OPENING):  # once all are free, no thread is left
            self._openings.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError("this end of Mooncake is closed")


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    label: str
    address: str  # of the handshake
    regions: tuple[tuple[int, int], ...]  # address, length


class _Extents:
    """Answers whether a range lies in one of several regions, in the logarithm of their number."""

    def __init__(self, regions: Iterable[Region]) -> None:
        pairs = sorted((region.address, region.address + region.length) for region in regions)
        self._starts = [start for start, _ in pairs]
        self._ends = list(accumulate((end for _, end in pairs), max))  # of the regions that start no later

    def hold(self, address: int, length: int) -> bool:
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and address + length <= self._ends[index]


class _Connection:
    """One peer's engine, which a thread opens. Nothing here waits."""

    def __init__(self, api: Any, peer: Peer, address: str, openings: threading.Semaphore) -> None:
        self.peer = peer
        self._address = address
        self.targets = _Extents(())
        self.failure: str | None = None
        self.posted = 0  # pieces whose end has not been seen
        self._left: deque[int] = deque()  # posted pieces of transfers that were closed
        self._lock = threading.Lock()  # guards _engine, failure and _opening, which the thread writes too
        self._engine: Any = None
        self._opening = True
        self._deadline = time.monotonic() + _CONNECT_S
        threading.Thread(target=self._open, args=(api, openings), name="mooncake-connect", daemon=True).start()

    def engine(self) -> Any:
        """Return the engine, or None while it is being opened; raises TransportError once the connection has failed."""
        if self._opening and self.failure is None and time.monotonic() > self._deadline:
            self._fail(f"no connection within {_CONNECT_S} s")
            cut_connections(self._address)
        if self.failure is not None:
            raise TransportError(f"Mooncake cannot write to {self.peer}: {self.failure}")
        return self._engine

    def submit(self, piece: Piece) -> int | None:
        """Post a piece and return its batch; None where it has to wait."""
        engine = self.engine()
        if engine is None or (self.posted >= _MAX_POSTED and not self._reap(engine)):
            return None
        batch = int(engine.transfer_submit_write(self._address, piece.local, piece.remote, piece.length))
        if batch == 0:
            raise self._failed("Mooncake refused a piece")
        self.posted += 1
        return batch

    def done(self, batch: int) -> bool:
        """Whether a piece has landed; one that has must not be asked for again. Raises TransportError if it never will."""
        state = self.engine().transfer_check_status(batch)
        if state == 0:
            return False
        self.posted -= 1
        if state < 0:
            raise self._failed("a piece did not arrive")
        return True

    def leave(self, batches: Iterable[int]) -> None:
        """Take over pieces that nobody waits for any more."""
        self._left.extend(batches)

    def close(self) -> None:
        """Release the engine, or have its thread do it."""
        with self._lock:
            self.failure = self.failure or "it was disconnected"
            engine, self._engine = self._engine, None
        if engine is not None:
            wake_engine(engine)
        elif self._opening:
            cut_connections(self._address)

    def _failed(self, reason: str) -> TransportError:
        self._fail(reason)
        return TransportError(f"Mooncake cannot write to {self.peer}: {reason}")

    def _fail(self, reason: str) -> None:
        with self._lock:
            self.failure = self.failure or reason

    def _reap(self, engine: Any) -> bool:
        while self._left and engine.transfer_check_status(self._left[0]) != 0:
            self._left.popleft()
            self.posted -= 1
        return self.posted < _MAX_POSTED

    def _open(self, api: Any, openings: threading.Semaphore) -> None:
        with ExitStack() as stack:
            stack.callback(openings.release)
            engine = None
            try:
                self._address = numeric(self._address)
                engine = start_engine(api, "127.0.0.1")  # nobody needs to reach it
                # A write of no bytes opens the peer and sends nothing.
                batch = 0 if self.failure is not None else engine.transfer_submit_write(self._address, 0, 0, 0)
                if batch == 0 or engine.transfer_check_status(batch) != 1:
                    self._fail(f"no Mooncake answers at {self._address}")
            except (TransportError, RuntimeError) as error:
                self._fail(str(error))
            with self._lock:
                self._opening = False
                if self.failure is None:
                    self._engine, engine = engine, None
            if engine is not None:
                wake_engine(engine)


class _MooncakeTransfer:
    def __init__(self, connection: _Connection, pieces: Sequence[Piece]) -> None:
        self._connection = connection
        self._waiting = deque(pieces)
        self._posted: deque[int] = deque()

    def post(self) -> None:
        while self._waiting and (batch := self._connection.submit(self._waiting[0])) is not None:
            self._waiting.popleft()
            self._posted.append(batch)

    def poll(self) -> Progress:
        while self._posted and self._connection.done(self._posted[0]):
            self._posted.popleft()
        self.post()
        return Progress.BUSY if self._posted or self._waiting else Progress.DONE

    def close(self) -> None:
        self._waiting.clear()
        self._connection.leave(self._posted)
        self._posted.clear()
