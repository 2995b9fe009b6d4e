"""The worker side's sockets to daemons, and the handshake each begins with."""

import logging
from dataclasses import dataclass, field
from itertools import count

import zmq

from connector.handoffs import Outgoing
from handoff.messages import (
    MAX_MESSAGE_BYTES,
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
_MAX_HELLOS = 2  # per handoff: a daemon that restarted asks for one more


@dataclass(slots=True)
class Link:
    """One daemon: its socket, and the transport peer once it said Welcome."""

    socket: "zmq.Socket[bytes]"
    peer: Peer | None = None
    greeted: bool = False  # Hello has been said
    welcome: bool = False  # and Welcome has come back: Begin may be said
    waiting: list[Outgoing] = field(default_factory=list)  # to begin when the daemon says Welcome


class Peers:
    """Owns one link per daemon, kept for as long as the daemon answers."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        transport: Transport,
        hello: Hello,
        identity: bytes,
    ) -> None:
        self._context = context
        self._transport = transport
        self._hello = hello
        self._identity = identity
        self._links: dict[Address, Link] = {}
        self._polled: set[zmq.Socket[bytes]] = set()
        self._sockets_opened = count()

    def begin(self, outgoing: Outgoing) -> None:
        """Ask for a landing region, after the handshake where there has been none."""
        link = self._links.get(outgoing.peer_address)
        if link is None:
            try:
                link = self._links[outgoing.peer_address] = Link(self._open(outgoing.peer_address))
            except zmq.ZMQError as error:
                outgoing.withdraw(f"the daemon cannot be addressed: {error}")
                return
        if link.welcome:
            self._send(link, Begin(outgoing.claim, outgoing.prompt_tokens))
            return
        link.waiting.append(outgoing)
        self._greet(link)

    def send(self, outgoing: Outgoing, message: Sent | Stopped | Abort) -> None:
        """Send a handoff's last message, if its daemon is still known."""
        link = self._links.get(outgoing.peer_address)
        if link is not None:
            self._send(link, message)

    def sync(self, poller: zmq.Poller) -> "list[zmq.Socket[bytes]]":
        """Make the poller watch exactly the open sockets; return them."""
        sockets = {link.socket for link in self._links.values()}
        for socket in sockets - self._polled:
            poller.register(socket, zmq.POLLIN)
        for socket in self._polled - sockets:
            poller.unregister(socket)
        self._polled = sockets
        return list(sockets)

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

        The socket stays for as long as it is `needed` by another handoff, whose answer may be on its way.
        """
        link = self._links.get(address)
        if link is None:
            return
        self._forget_peer(link)
        link.greeted = link.welcome = False
        link.waiting = [outgoing for outgoing in link.waiting if not outgoing.ended]
        if not needed:
            del self._links[address]
            link.socket.close(linger=_LINGER_MS)

    def close(self) -> None:
        """Close every socket."""
        for address in list(self._links):
            self.distrust(address, needed=False)

    def _open(self, address: Address) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        # A name of its own: the daemon's answers would go to the socket before this one while that one lingers.
        socket.setsockopt(zmq.IDENTITY, b"%s-%d" % (self._identity, next(self._sockets_opened)))
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.connect(f"tcp://{address[0]}:{address[1]}")
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _greet(self, link: Link) -> None:
        if not link.greeted:
            link.greeted = True
            self._send(link, self._hello)

    def _send(self, link: Link, message: Hello | Begin | Sent | Stopped | Abort) -> None:
        try:
            link.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("a daemon takes no messages; %s is lost", type(message).__name__)

    def _handle(self, address: Address, message: ToConnector, outgoing: dict[str, Outgoing]) -> None:
        link = self._links[address]
        match message:
            case Welcome():
                self._on_welcome(link, message)
            case Refused():
                logger.error("daemon %s:%d cannot take this KV cache: %s", *address, message.describe())
                self._fail_waiting(link, message.describe())
            case Accepted() | Rejected() | Cancel():
                found = next((o for o in outgoing.values() if o.handoff_id == message.handoff_id), None)
                # A handoff names the daemon it belongs to: another daemon has no say in it.
                if found is None or found.peer_address != address:
                    return
                self._on_answer(link, found, message)
            case Waiting():
                pass  # that it came is all the daemon wants

    def _on_welcome(self, link: Link, message: Welcome) -> None:
        if message.protocol != PROTOCOL_VERSION:
            self._fail_waiting(link, f"the daemon speaks protocol {message.protocol}, this connector {PROTOCOL_VERSION}")
            return
        try:
            peer = self._transport.connect(message.agent)
        except TransportError as error:
            self._fail_waiting(link, str(error))
            return
        if peer != link.peer:  # the same one has new memory; handoffs under way to its other memory go on
            self._forget_peer(link)
        link.peer, link.welcome = peer, True
        waiting, link.waiting = link.waiting, []
        for outgoing in waiting:
            if not outgoing.ended:
                self._send(link, Begin(outgoing.claim, outgoing.prompt_tokens))

    def _on_answer(self, link: Link, outgoing: Outgoing, message: Accepted | Rejected | Cancel) -> None:
        if isinstance(message, Accepted):
            if link.peer is not None:
                outgoing.accept(message.address, message.length, link.peer)
        elif isinstance(message, Cancel):
            outgoing.withdraw(f"cancelled by the daemon: {message.reason}", cancelled=True)
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
            peer, link.peer = link.peer, None
            try:
                self._transport.disconnect(peer)
            except TransportError as error:
                logger.warning("%s", error)

    def _fail_waiting(self, link: Link, reason: str) -> None:
        waiting, link.waiting = link.waiting, []
        link.greeted = False  # a daemon that was reconfigured gets another chance with the next handoff
        for outgoing in waiting:
            outgoing.withdraw(reason)
