"""The scheduler side's voice: control messages to daemons, never waiting for any of them."""

import logging

import zmq

from connector.sockets import open_dealer
from handoff.claim import Claim
from handoff.messages import Abort, Final, encode

logger = logging.getLogger(f"vllm.anchorleg.{__name__}")  # below vLLM's own logger, so that its settings hold

_MAX_PEERS = 128  # daemons come and go, and libzmq has 1,023 sockets
_LINGER_MS = 500


class Announcer:
    """One PUSH-like DEALER socket per daemon, opened when a claim for it is first seen. Used from one thread."""

    def __init__(self) -> None:
        self._context = zmq.Context(io_threads=1)
        self._sockets: dict[tuple[str, int], zmq.Socket[bytes]] = {}  # the least recently used first

    def connect(self, claim: Claim) -> None:
        """Open the socket ahead of the message that will need it; idempotent."""
        try:
            self._socket(claim)
        except (zmq.ZMQError, UnicodeEncodeError) as error:
            logger.warning("daemon %r:%d cannot be addressed: %s", claim.host, claim.port, error)

    def send(self, claim: Claim, message: Final | Abort) -> None:
        """Queue a message; a daemon that is away loses it (its own deadline covers that) and delays nobody."""
        try:
            self._socket(claim).send(encode(message), zmq.NOBLOCK)
        except (zmq.ZMQError, UnicodeEncodeError) as error:
            logger.warning("handoff %s: daemon %r:%d takes no messages: %s", claim.handoff_id, claim.host, claim.port, error)

    def close(self) -> None:
        """Release the sockets; what was just said still gets out to daemons that are there."""
        for socket in self._sockets.values():
            socket.close(linger=_LINGER_MS)
        self._sockets.clear()
        self._context.term()

    def _socket(self, claim: Claim) -> "zmq.Socket[bytes]":
        address = (claim.host, claim.port)
        socket = self._sockets.pop(address, None)
        if socket is None:
            if len(self._sockets) >= _MAX_PEERS:
                self._sockets.pop(next(iter(self._sockets))).close(linger=_LINGER_MS)
            socket = open_dealer(self._context, address, linger_ms=_LINGER_MS)
        self._sockets[address] = socket
        return socket
