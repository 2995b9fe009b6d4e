"""The connector's sockets to daemons: what finds out that one is gone, and how many are kept."""

import pytest
import zmq

from connector.announcer import Announcer
from connector.sockets import open_dealer
from handoff.messages import Abort, decode_for_daemon
from tests.kit.handoff import signed


def test_a_silent_connection_is_given_up_and_a_daemon_that_is_gone_is_rarely_looked_for() -> None:
    with zmq.Context() as context, open_dealer(context, ("127.0.0.1", 9), linger_ms=0) as socket:
        options = (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT, zmq.RECONNECT_IVL_MAX)
        assert [socket.getsockopt(option) for option in options] == [2000, 6000, 1000]


@pytest.mark.parametrize("host", ["not a host", "\ud800"])
def test_what_is_no_address_leaves_no_socket_behind(host: str) -> None:
    context = zmq.Context()
    with pytest.raises((zmq.ZMQError, UnicodeEncodeError)):
        open_dealer(context, (host, 9), linger_ms=0)
    context.term()  # would wait for a socket that is open


def test_of_many_daemons_the_announcer_keeps_the_last_it_spoke_to_and_what_it_said_to_others_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("connector.announcer._MAX_PEERS", 2)
    announcer, context = Announcer(), zmq.Context()
    daemons = [context.socket(zmq.ROUTER) for _ in range(3)]
    claims = [signed(port=daemon.bind_to_random_port("tcp://127.0.0.1")) for daemon in daemons]
    try:
        for index in (0, 1, 0, 2, 1, 0):
            announcer.send(claims[index].claim, Abort(claims[index], "over"))
        assert list(announcer._sockets) == [("127.0.0.1", claims[index].claim.port) for index in (1, 0)]
        for daemon, claim, count in zip(daemons, claims, (3, 2, 1), strict=True):
            for _ in range(count):
                assert daemon.poll(5000)
                assert decode_for_daemon(daemon.recv_multipart()[1]) == Abort(claim, "over")
    finally:
        announcer.close()
        for daemon in daemons:
            daemon.close(linger=0)
        context.term()
