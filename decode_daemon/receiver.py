"""The control socket: connectors introduce themselves, ask to write, and say what became of it."""

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import dataclass

import structlog
import zmq
import zmq.asyncio

from decode_daemon.expectation import Expectation
from decode_daemon.slots import LandingSlot, Occupancy, SlotRefused, Writer
from handoff.claim import Claim, ClaimError, ClaimKeys, SignedClaim
from handoff.layout import KVLayout
from handoff.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Begin,
    Cancel,
    Final,
    Hello,
    MessageError,
    Rejected,
    Sent,
    Stopped,
    ToConnector,
    Waiting,
    Welcome,
    decode_for_daemon,
    encode,
)
from handoff.transport import Transport
from process.errors import PortBusyError

__all__ = ["Expectation", "Receiver"]

log = structlog.get_logger(__name__)

_MAX_CONNECTORS = 4096
_MAX_LAYOUTS = 64
_LONGEST_NAME = 255  # of ZeroMQ's identities
# How soon it is found out that a writer has died. Its process's end closes the connection at once, its host's end is noticed
# by ZeroMQ's own heartbeat. One that was only interrupted tries to connect every 1.1 s (`connector.sockets`), and is back
# before so many looks have missed it.
_LOOK_S = 1.0
_MISSED_LOOKS = 3
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 6_000


@dataclass(frozen=True, slots=True)
class _Connector:
    engine: str
    shard: int
    shards: int
    layout: KVLayout
    generation: int  # of the landing memory its transport knows


class Receiver:
    """Owns the socket and the table of connectors that have been welcomed."""

    def __init__(
        self,
        *,
        daemon_id: str,
        host: str,
        port: int,
        keys: ClaimKeys,
        expectation: Expectation,
        transport: Transport,
    ) -> None:
        """Listen; raises PortBusyError."""
        self._daemon_id = daemon_id
        self._keys = keys
        self._expectation = expectation
        self._transport = transport
        self._slots: list[LandingSlot] = []
        self._connectors: OrderedDict[bytes, _Connector] = OrderedDict()
        self._layouts: dict[KVLayout, KVLayout] = {}  # by itself: connectors of one layout share one object
        self._missed: dict[bytes, int] = {}  # writers that could not be reached, and in how many looks on end
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a connector that reconnects keeps its identity
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending says so when a connector is gone
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._context.term()
            raise PortBusyError(f"cannot listen on {host}:{port} ({error}): choose another port with --control-port") from error
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._replies: asyncio.Queue[tuple[bytes, ToConnector]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, slots: list[LandingSlot]) -> None:
        """Begin to serve."""
        self._slots = slots
        self._tasks = [asyncio.create_task(work()) for work in (self._receive, self._reply, self._watch)]

    def send(self, identity: bytes, message: ToConnector) -> None:
        """Queue a message for a connector; one that is gone loses it."""
        self._replies.put_nowait((identity, message))

    async def aclose(self) -> None:
        """Stop serving and release the socket."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._socket.close(linger=0)
        self._context.term()

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if not 2 <= len(frames) <= 3:
                log.warning("control message of the wrong form", frames=len(frames))
                continue
            # The link's name before the socket's: a connection that broke may have got another (`handoff.messages`).
            identity, frame = frames[-2:]
            if len(identity) > _LONGEST_NAME:
                log.warning("control message of the wrong form", name_bytes=len(identity))
                continue
            try:
                message = decode_for_daemon(frame)
                if isinstance(message, Hello) and len(frames) > 2:
                    raise MessageError("Hello names a link: it is introduced by its own socket only")
                self._handle(identity, message)
            except MessageError as error:
                log.warning("control message refused", error=str(error))
            except Exception:
                log.exception("control message failed; others go on")

    async def _reply(self) -> None:
        while True:
            identity, message = await self._replies.get()
            try:
                await self._delivered(identity, message)  # where it matters that it was not, the message is said again
            except Exception:
                log.exception("a message was not sent; others go on", lost=type(message).__name__)

    async def _watch(self) -> None:
        """Find out which writers of handoffs under way are gone: nobody waits for the landing timeout to learn it."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._look()
            except Exception:
                log.exception("looking after the writers failed; it goes on")

    async def _look(self) -> None:
        gone: set[bytes] = set()
        for held in [held for slot in self._slots if (held := slot.watched)]:
            # One that has said Sent or Stopped owes nothing, and may go.
            for identity in [writer.identity for writer in held.writers.values() if writer.active and not writer.lost]:
                if not await self._delivered(identity, _reminder(held)):
                    gone.add(identity)
        self._missed = {identity: self._missed.get(identity, 0) + 1 for identity in gone}
        for identity in [identity for identity, looks in self._missed.items() if looks >= _MISSED_LOOKS]:
            self._lost(identity)

    async def _delivered(self, identity: bytes, message: ToConnector) -> bool:
        """Send; returns False where the connector is not connected. Never waits: one that reads nothing delays nobody."""
        try:
            await self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            log.warning("a connector takes no messages", lost=type(message).__name__)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            log.warning("a message was not sent", lost=type(message).__name__, error=str(error))
        return True

    def _lost(self, identity: bytes) -> None:
        for slot in self._slots:
            slot.lost(identity)

    def _handle(self, identity: bytes, message: Hello | Begin | Sent | Final | Abort | Stopped) -> None:
        try:
            match message:
                case Hello():
                    self._on_hello(identity, message)
                case Begin():
                    self._on_begin(identity, message)
                case Sent():
                    self._slot_of(message.handoff_id).sent(identity, message, time.monotonic())
                case Stopped():
                    for slot in self._slots:
                        slot.stopped(identity, message.handoff_id, message.epoch)
                case Final():
                    self._slot(self._signed(message.claim)).final(message, time.monotonic())
                case Abort():
                    claim = self._signed(message.claim)
                    self._slot(claim).abort(identity, claim.handoff_id, claim.epoch, message.reason, writing=message.writing)
        except (SlotRefused, ClaimError) as error:
            # Ordinary where a handoff was cancelled while its messages were on their way.
            log.info("control message refused", kind=type(message).__name__, reason=str(error))

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        refused = self._expectation.mismatch(hello, self._transport.name)
        if refused is not None:
            log.error("connector refused: its KV cache is of no use here", reason=refused.describe())
            self.send(identity, refused)
            return
        layout = self._layouts.setdefault(hello.layout, hello.layout)
        if len(self._layouts) > _MAX_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        # The generation is read before the metadata: memory that is renewed in between costs another Hello, and no more.
        self._connectors[identity] = _Connector(hello.engine_id, hello.shard, hello.shards, layout, self._generation())
        self._connectors.move_to_end(identity)
        while len(self._connectors) > _MAX_CONNECTORS:
            self._connectors.popitem(last=False)
        shard = f"{hello.shard + 1} of {hello.shards}"
        log.info("connector welcomed", engine=hello.engine_id, shard=shard, layout=hello.layout.fingerprint)
        self.send(identity, Welcome(PROTOCOL_VERSION, self._daemon_id, self._transport.metadata()))

    def _on_begin(self, identity: bytes, begin: Begin) -> None:
        handoff_id = begin.claim.claim.handoff_id
        connector = self._connectors.get(identity)
        if connector is None or connector.generation != self._generation():
            self._connectors.pop(identity, None)
            self.send(identity, Rejected(handoff_id, "introduce yourself first", hello=True))
            return
        try:
            claim = self._signed(begin.claim)
            slot = self._slot(claim)
            writer = Writer(
                identity, connector.shard, connector.shards, connector.layout, begin.tokens, engine=connector.engine
            )
            region = slot.region_of(writer, claim.handoff_id, claim.epoch)
            if region is None:
                slot.expects(writer, claim.handoff_id, claim.epoch)  # first: a replay must not end what began in time
                self._unexpired(begin.claim, slot)
                region = slot.begin(writer, claim.handoff_id, claim.epoch, time.monotonic())
        except (SlotRefused, ClaimError) as error:
            log.warning("writer refused", handoff=handoff_id, reason=str(error))
            self.send(identity, Rejected(handoff_id, str(error)))
            return
        self._transport.nudge()
        self.send(identity, Accepted(handoff_id, *region))

    def _generation(self) -> int:
        return sum(slot.memory.generation for slot in self._slots)

    def _signed(self, signed: SignedClaim) -> Claim:
        """Return a claim of ours, also one that has expired since its handoff began: its epoch says whether it still holds."""
        return self._keys.verify(signed, now=0)

    def _unexpired(self, signed: SignedClaim, slot: LandingSlot) -> None:
        """Raise ClaimError, and fail the handoff, where a claim came too late to begin with."""
        try:
            self._keys.verify(signed)
        except ClaimError as error:
            slot.fail(signed.claim.handoff_id, signed.claim.epoch, str(error))
            raise

    def _slot(self, claim: Claim) -> LandingSlot:
        if not 0 <= claim.slot < len(self._slots):
            raise SlotRefused("no_such_slot", f"slot {claim.slot} is not one of {len(self._slots)}")
        return self._slots[claim.slot]

    def _slot_of(self, handoff_id: str) -> LandingSlot:
        for slot in self._slots:
            if slot.holds(handoff_id):
                return slot
        raise SlotRefused("unknown_handoff", f"no slot waits for handoff {handoff_id}")


def _reminder(held: Occupancy) -> Cancel | Waiting:
    """Return what a writer that has yet to say its last word is told: again, since it may have missed it."""
    if held.cancelled is not None:
        return Cancel(held.handoff_id, held.epoch, held.cancelled)
    return Waiting(held.handoff_id, held.epoch)
