"""What a daemon did not answer is said again: a message that is on its way when a connection breaks may be lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
import zmq
import zmq.asyncio

from connector import sender
from handoff.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Begin,
    Cancel,
    Hello,
    Rejected,
    Sent,
    Stopped,
    ToConnector,
    ToDaemon,
    Waiting,
    Welcome,
    decode_for_daemon,
    encode,
)
from handoff.transports import open_transport
from tests.kit.handoff import BLOCKS, LANDING_BYTES, LAYOUT, TOKENS, prefill, region, signed


class Deaf:
    """A daemon that answers what a test wants; its memory is real."""

    def __init__(self, socket: "zmq.asyncio.Socket", agent: bytes, address: int) -> None:
        self._socket = socket
        self._agent = agent
        self._address = address
        self._identity = b""
        self.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    async def hear(self, kind: type[ToDaemon]) -> ToDaemon:
        """The next message of this kind, with its link's name before it; others may have been said again meanwhile."""
        async with asyncio.timeout(5):
            while True:
                self._identity, *link, frame = await self._socket.recv_multipart()
                message = decode_for_daemon(frame)
                assert link == ([] if isinstance(message, Hello) else [self._identity])
                if isinstance(message, kind):
                    return message

    async def say(self, message: ToConnector) -> None:
        await self._socket.send_multipart([self._identity, encode(message)])

    async def welcome(self) -> None:
        await self.say(Welcome(PROTOCOL_VERSION, "daemon", self._agent))

    async def accept(self, handoff_id: str) -> None:
        await self.say(Accepted(handoff_id, self._address, LAYOUT.bytes_for(TOKENS)))


@pytest.fixture
async def daemon(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deaf]:
    monkeypatch.setattr(sender, "_REMIND_S", 0.05)
    async with _deaf() as daemon:
        yield daemon


@asynccontextmanager
async def _deaf() -> AsyncIterator[Deaf]:
    memory, transport = torch.zeros(LANDING_BYTES, dtype=torch.uint8), open_transport("nixl", "landing", attend=lambda: True)
    transport.register([region(memory)])
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind("tcp://127.0.0.1:*")
        try:
            yield Deaf(socket, transport.metadata(), memory.data_ptr())
        finally:
            transport.close()


async def test_a_hello_and_a_begin_are_said_until_they_are_answered(daemon: Deaf) -> None:
    with prefill() as worker:
        claim = signed(port=daemon.port)
        request = worker.open(claim, TOKENS)
        assert await daemon.hear(Hello) == await daemon.hear(Hello)
        await daemon.welcome()
        assert await daemon.hear(Begin) == await daemon.hear(Begin) == Begin(claim, TOKENS)
        await daemon.accept(claim.claim.handoff_id)
        worker.write(request, BLOCKS)
        await daemon.hear(Sent)
        await worker.settled(request)
        assert worker.failed == []


async def test_a_daemon_that_does_not_know_a_rank_may_say_so_to_each_begin_that_was_said_again(daemon: Deaf) -> None:
    with prefill() as worker:
        claim = signed(port=daemon.port)
        request = worker.open(claim, TOKENS)
        await daemon.hear(Hello)
        await daemon.welcome()
        await daemon.hear(Begin)
        for _ in range(5):
            await daemon.say(Rejected(claim.claim.handoff_id, "introduce yourself first", hello=True))
        await daemon.hear(Hello)
        await daemon.welcome()
        await daemon.hear(Begin)
        await daemon.accept(claim.claim.handoff_id)
        worker.write(request, BLOCKS)
        await daemon.hear(Sent)
        assert worker.failed == []


async def test_the_last_word_of_a_handoff_is_said_again_to_a_daemon_that_waits_for_it(daemon: Deaf) -> None:
    with prefill() as worker:
        claims = [signed(port=daemon.port) for _ in range(2)]
        written, left = (worker.open(claim, TOKENS) for claim in claims)
        await daemon.hear(Hello)
        await daemon.welcome()
        for claim in claims:
            await daemon.accept(claim.claim.handoff_id)
        worker.write(written, BLOCKS)
        whole = await daemon.hear(Sent)
        gone = Cancel(claims[1].claim.handoff_id, claims[1].claim.epoch, "the client left")
        await daemon.say(gone)
        stopped = await daemon.hear(Stopped)
        await worker.settled(written, left)
        await daemon.say(Waiting(claims[0].claim.handoff_id, claims[0].claim.epoch))
        assert await daemon.hear(Sent) == whole
        await daemon.say(Cancel(claims[0].claim.handoff_id, claims[0].claim.epoch, "too late"))
        assert await daemon.hear(Sent) == whole
        await daemon.say(gone)
        assert await daemon.hear(Stopped) == stopped
