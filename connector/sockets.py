"""A socket to a daemon, as both sides of the connector open it."""

import zmq

from handoff.messages import MAX_MESSAGE_BYTES

_RECONNECT_MAX_MS = 1000  # a daemon that is gone is looked for this rarely, and found this late
_HEARTBEAT_MS = 2000
_HEARTBEAT_LOST_MS = 6000  # a host that vanished closes no connection


def open_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", address: tuple[str, int], *, linger_ms: int, identity: bytes = b""
) -> "zmq.Socket[bytes]":
    """Return a socket that connects to (host, port) on its own time, and after its end still sends for `linger_ms`.

    Raises zmq.ZMQError, or UnicodeEncodeError for half of a surrogate pair, when that is no address.
    """
    socket = context.socket(zmq.DEALER)
    try:
        if identity:
            socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, linger_ms)
        socket.setsockopt(zmq.SNDHWM, 1000)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_LOST_MS)
        socket.connect(f"tcp://{address[0]}:{address[1]}")
    except BaseException:
        socket.close(linger=0)
        raise
    return socket
