"""The control socket: connectors introduce themselves, ask to write, and say what became of it."""

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import dataclass

import structlog
import zmq
import zmq.asyncio

from decode_daemon.slots import LandingSlot, SlotRefused, Writer
from handoff.claim import Claim, ClaimError, ClaimKeys, SignedClaim
from handoff.layout import KVLayout, LayoutError
from handoff.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Begin,
    Final,
    Hello,
    MessageError,
    ModelIdentity,
    Refused,
    Rejected,
    Sent,
    Stopped,
    ToConnector,
    Welcome,
    decode_for_daemon,
    encode,
)
from handoff.transport import Transport
from process.errors import PortBusyError

log = structlog.get_logger(__name__)

_MAX_CONNECTORS = 4096


@dataclass(frozen=True, slots=True)
class Expectation:
    """What this daemon's engine can take."""

    model: ModelIdentity
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int  # of the largest block: a landing region has room for one that is only partly used

    def mismatch(self, hello: Hello, transport: str) -> Refused | None:
        """Return the first field in which a connector differs, or None."""
        block = hello.layout.block
        pairs = {
            "protocol": (hello.protocol, PROTOCOL_VERSION),
            "transport": (hello.transport, transport),
            "tensor-parallel size": (hello.ranks, 1),
            "rank": (hello.rank, 0),
            "served model name": (hello.model.name, self.model.name),
            "model weights": (hello.model.weights, self.model.weights),
            "context tokens": (hello.model.context_tokens, self.model.context_tokens),
            "layers": (len(hello.layout.layers), self.layers),
            "KV heads": (block.kv_heads, self.kv_heads),
            "head dim": (block.head_dim, self.head_dim),
            "KV dtype": (block.dtype, self.dtype),
        }
        for field, (theirs, ours) in pairs.items():
            if theirs != ours:
                return Refused(field, str(theirs), str(ours))
        if block.block_tokens > self.block_tokens:
            return Refused("block size", str(block.block_tokens), f"{self.block_tokens} at the most")
        try:  # last: it counts elements, of which there are not many now
            hello.layout.validate()
        except LayoutError as error:
            return Refused("layout", str(error), "a strided block layout")
        return None


@dataclass(frozen=True, slots=True)
class _Connector:
    rank: int
    ranks: int
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
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a connector that reconnects keeps its identity
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
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._reply())]

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
            if len(frames) != 2:
                log.warning("control message of the wrong form", frames=len(frames))
                continue
            identity, frame = frames
            try:
                self._handle(identity, decode_for_daemon(frame))
            except MessageError as error:
                log.warning("control message refused", error=str(error))
            except Exception:
                log.exception("control message failed; others go on")

    async def _reply(self) -> None:
        while True:
            identity, message = await self._replies.get()
            with contextlib.suppress(zmq.ZMQError):  # unroutable: the connector is gone
                await self._socket.send_multipart([identity, encode(message)])

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
                    self._slot(self._verified(message.claim)).final(message, time.monotonic())
                case Abort():
                    claim = self._verified(message.claim)
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
        self._connectors[identity] = _Connector(hello.rank, hello.ranks, hello.layout, self._generation())
        self._connectors.move_to_end(identity)
        while len(self._connectors) > _MAX_CONNECTORS:
            self._connectors.popitem(last=False)
        log.info("connector welcomed", engine=hello.engine_id, rank=hello.rank, layout=hello.layout.fingerprint)
        self.send(identity, Welcome(PROTOCOL_VERSION, self._daemon_id, self._transport.metadata()))

    def _on_begin(self, identity: bytes, begin: Begin) -> None:
        handoff_id = begin.claim.claim.handoff_id
        connector = self._connectors.get(identity)
        if connector is None or connector.generation != self._generation():
            self._connectors.pop(identity, None)
            self.send(identity, Rejected(handoff_id, "introduce yourself first", hello=True))
            return
        try:
            claim = self._verified(begin.claim)
            writer = Writer(identity, connector.rank, connector.ranks, connector.layout, begin.tokens)
            address, length = self._slot(claim).begin(writer, claim.handoff_id, claim.epoch, time.monotonic())
        except (SlotRefused, ClaimError) as error:
            log.warning("writer refused", handoff=handoff_id, reason=str(error))
            self.send(identity, Rejected(handoff_id, str(error)))
            return
        self._transport.nudge()
        self.send(identity, Accepted(handoff_id, address, length))

    def _generation(self) -> int:
        return sum(slot.memory.generation for slot in self._slots)

    def _verified(self, signed: SignedClaim) -> Claim:
        return self._keys.verify(signed)

    def _slot(self, claim: Claim) -> LandingSlot:
        if not 0 <= claim.slot < len(self._slots):
            raise SlotRefused("no_such_slot", f"slot {claim.slot} is not one of {len(self._slots)}")
        return self._slots[claim.slot]

    def _slot_of(self, handoff_id: str) -> LandingSlot:
        for slot in self._slots:
            if slot.holds(handoff_id):
                return slot
        raise SlotRefused("unknown_handoff", f"no slot waits for handoff {handoff_id}")
