"""The worker side's sockets to daemons, and the handshake each begins with."""

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import zmq

from connector.handoffs import Outgoing
from connector.sockets import open_dealer
from handoff.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Begin,
    Cancel,
    Hello,
    MessageError,
    Refused,
    Rejected,
    Sent,
    Stopped,
    ToConnector,
    Waiting,
    Welcome,
    decode_for_connector,
    encode,
)
from handoff.transport import Peer, Transport, TransportError

logger = logging.getLogger(f"vllm.anchorleg.{__name__}")  # below vLLM's own logger, so that its settings hold

Address = tuple[str, int]
_LINGER_MS = 1000  # for the last message to get out
_MAX_LINKS = 128  # daemons come and go, and libzmq has 1,023 sockets
_MAX_HELLOS = 2  # per handoff: a daemon that restarted asks for one more
_HELLO_S = 0.9  # between two to one daemon
_LAST_WORDS = 64  # kept per daemon, which has at most 16 slots


@dataclass(slots=True)
class Link:
    """One daemon: its socket, and the transport peer once it said Welcome."""

    name: bytes  # the socket's identity, of no other link
    socket: "zmq.Socket[bytes]"
    peer: Peer | None = None
    greeted: bool = False  # Hello has been said
    greeted_at: float = 0.0
    welcome: bool = False  # and Welcome has come back: Begin may be said
    stale: bool = False  # a write through the peer failed: connect anew once no handoff writes through it
    waiting: list[Outgoing] = field(default_factory=list)  # to begin when the daemon says Welcome
    last_words: dict[str, Sent | Stopped | Abort] = field(default_factory=dict)  # by handoff, the latest last


class Peers:
    """Owns one link per daemon, kept for as long as the daemon answers and is among the last that were used."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        transport: Transport,
        hello: Hello,
        identity: bytes,
        poller: zmq.Poller,
    ) -> None:
        self._context = context
        self._transport = transport
        self._hello = hello
        self._identity = identity
        self._poller = poller  # watches exactly the open sockets
        self._links: dict[Address, Link] = {}  # the least recently used first

    def begin(self, outgoing: Outgoing, live: Mapping[str, Outgoing]) -> None:
        """Ask for a landing region, after the handshake where there has been none.

        `live`: every handoff that is under way; their daemons' links are kept.
        """
        address = outgoing.peer_address
        link = self._links.pop(address, None)
        if link is None:
            self._make_room(live)
            try:
                link = self._open(address)
            except (zmq.ZMQError, UnicodeEncodeError) as error:
                outgoing.withdraw(f"the daemon cannot be addressed: {error}")
                return
        self._links[address] = link
        if link.welcome and _replaceable(link, live):
            link.greeted = link.welcome = False
        if link.welcome:
            self._ask(link, outgoing)
            return
        link.waiting.append(outgoing)
        self._greet(link)

    def send(self, outgoing: Outgoing, message: Sent | Stopped | Abort) -> None:
        """Send a handoff's last message, if its daemon is still known."""
        link = self._links.get(outgoing.peer_address)
        if link is not None:
            self._send(link, message)
            link.last_words[outgoing.handoff_id] = message
            if len(link.last_words) > _LAST_WORDS:
                del link.last_words[next(iter(link.last_words))]

    def remind(self, outgoing: Outgoing) -> None:
        """Say again what the daemon has not answered: it, or the answer, may have been lost with a connection."""
        link = self._links.get(outgoing.peer_address)
        if link is None:
            return
        if not link.welcome:
            if time.monotonic() - link.greeted_at > _HELLO_S:  # several handoffs may wait for one Welcome
                link.greeted = False
                self._greet(link)
        elif outgoing.asked is not None:
            self._ask(link, outgoing)

    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """Return the open sockets."""
        return [link.socket for link in self._links.values()]

    def receive(self, socket: "zmq.Socket[bytes]", outgoing: dict[str, Outgoing]) -> None:
        """Handle every message that is waiting on a socket."""
        address = next((a for a, link in self._links.items() if link.socket is socket), None)
        while address is not None and address in self._links:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(address, decode_for_connector(frame), outgoing)
            except MessageError as error:
                logger.warning("daemon %s:%d sent no message of ours: %s", *address, error)

    def distrust(self, address: Address, *, needed: bool) -> None:
        """The daemon did not answer, or a write to it failed: the next handoff starts with a new handshake.

        Where another handoff `needed` it, socket and peer stay: its answer may be on its way, and so may its writes.
        """
        link = self._links.get(address)
        if link is None:
            return
        if needed:
            link.greeted = link.welcome = False
            link.stale = link.peer is not None
            link.waiting = [outgoing for outgoing in link.waiting if not outgoing.ended]
        else:
            self._drop(address)

    def close(self) -> None:
        """Close every socket."""
        for address in list(self._links):
            self._drop(address)

    def _make_room(self, live: Mapping[str, Outgoing]) -> None:
        if len(self._links) >= _MAX_LINKS:
            busy = {outgoing.peer_address for outgoing in live.values()}
            unused = next((address for address in self._links if address not in busy), None)
            if unused is not None:
                self._drop(unused)

    def _drop(self, address: Address) -> None:
        link = self._links.pop(address)
        self._forget_peer(link)
        self._poller.unregister(link.socket)  # a poller does not know a socket that is closed
        link.socket.close(linger=_LINGER_MS)

    def _open(self, address: Address) -> Link:
        # A name of its own, since answers would go to the socket before this one while that one lingers; nobody can guess it.
        name = b"%s-%s" % (self._identity, secrets.token_hex(8).encode())
        socket = open_dealer(self._context, address, linger_ms=_LINGER_MS, identity=name)
        self._poller.register(socket, zmq.POLLIN)
        return Link(name, socket)

    def _greet(self, link: Link) -> None:
        if not link.greeted:
            link.greeted, link.greeted_at = True, time.monotonic()
            self._send(link, self._hello)

    def _ask(self, link: Link, outgoing: Outgoing) -> None:
        outgoing.asked = link.peer
        self._send(link, Begin(outgoing.claim, outgoing.prompt_tokens))

    def _send(self, link: Link, message: Hello | Begin | Sent | Stopped | Abort) -> None:
        frames = [encode(message)] if isinstance(message, Hello) else [link.name, encode(message)]
        try:
            link.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("a daemon takes no messages; %s is lost", type(message).__name__)

    def _handle(self, address: Address, message: ToConnector, outgoing: dict[str, Outgoing]) -> None:
        link = self._links[address]
        match message:
            case Welcome():
                self._on_welcome(link, message, outgoing)
            case Refused():
                logger.error("daemon %s:%d cannot take this KV cache: %s", *address, message.describe())
                self._fail_waiting(link, message.describe())
            case Accepted() | Rejected() | Cancel():
                found = next((o for o in outgoing.values() if o.handoff_id == message.handoff_id), None)
                # A handoff names the daemon it belongs to: another daemon has no say in it.
                if found is not None and found.peer_address == address:
                    self._on_answer(link, found, message)
                elif isinstance(message, Cancel):
                    self._repeat(link, message.handoff_id)
            case Waiting():
                self._repeat(link, message.handoff_id)

    def _repeat(self, link: Link, handoff_id: str) -> None:
        """Say a handoff's last word again; that a message came is all the daemon wants to know of one under way."""
        last = link.last_words.get(handoff_id)
        if last is not None:
            self._send(link, last)

    def _on_welcome(self, link: Link, message: Welcome, outgoing: Mapping[str, Outgoing]) -> None:
        if message.protocol != PROTOCOL_VERSION:
            self._fail_waiting(link, f"the daemon speaks protocol {message.protocol}, this connector {PROTOCOL_VERSION}")
            return
        if _replaceable(link, outgoing):
            self._forget_peer(link)
        try:
            peer = self._transport.connect(message.agent)
        except TransportError as error:
            self._fail_waiting(link, str(error))
            return
        if peer != link.peer:  # the same one has new memory; handoffs under way to its other memory go on
            self._forget_peer(link)
        link.peer, link.welcome = peer, True
        waiting, link.waiting = link.waiting, []
        for one in waiting:
            if not one.ended:
                self._ask(link, one)

    def _on_answer(self, link: Link, outgoing: Outgoing, message: Accepted | Rejected | Cancel) -> None:
        if isinstance(message, Accepted):
            if outgoing.asked is not None:
                outgoing.accept(message.address, message.length, outgoing.asked)
        elif isinstance(message, Cancel):
            outgoing.withdraw(f"cancelled by the daemon: {message.reason}", cancelled=True)
        elif outgoing.address is not None or any(one is outgoing for one in link.waiting):
            pass  # to a Begin that was said again: the one before it has been answered
        elif message.hello and outgoing.hellos < _MAX_HELLOS:
            outgoing.hellos += 1
            if link.welcome:  # otherwise another handoff's rejection has led to a Hello already
                link.greeted = link.welcome = False
            link.waiting.append(outgoing)
            self._greet(link)
        else:
            # Where another holds the slot, or writes already, an Abort would be the end of that handoff.
            outgoing.withdraw(f"rejected by the daemon: {message.reason}", rejected=not message.hello)

    def _forget_peer(self, link: Link) -> None:
        if link.peer is not None:
            peer, link.peer, link.stale = link.peer, None, False
            try:
                self._transport.disconnect(peer)
            except TransportError as error:
                logger.warning("%s", error)

    def _fail_waiting(self, link: Link, reason: str) -> None:
        waiting, link.waiting = link.waiting, []
        link.greeted = False  # a daemon that was reconfigured gets another chance with the next handoff
        for outgoing in waiting:
            outgoing.withdraw(reason)


def _replaceable(link: Link, live: Mapping[str, Outgoing]) -> bool:
    """Whether the peer failed a write, and no other handoff writes through it."""
    return link.stale and not any(outgoing.peer == link.peer for outgoing in live.values())
