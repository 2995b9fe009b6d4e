"""A connector that says what a test wants, over the daemon's real control socket."""

import asyncio
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from decode_daemon.slots import Occupancy
from handoff.claim import SignedClaim
from handoff.messages import Accepted, Begin, Hello, Refused, Sent, ToConnector, ToDaemon, Waiting, decode_for_connector, encode
from tests.kit.handoff import LAYOUT, Landing, hello

TOKENS = 10


class Voice:
    """A connector that says what a test wants, over the real socket; with an `identity` as the link of that name.

    `connected`: it is, before anything else runs in this thread.
    """

    def __init__(self, port: int, identity: bytes | None = None, *, connected: bool = False) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._link = identity
        if identity is not None:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        if not connected:
            self._socket.connect(f"tcp://127.0.0.1:{port}")
            return
        self._socket.monitor("inproc://handshake", zmq.EVENT_HANDSHAKE_SUCCEEDED)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        with context.socket(zmq.PAIR) as events:
            events.setsockopt(zmq.RCVTIMEO, 5_000)
            events.connect("inproc://handshake")
            self._socket.connect(f"tcp://127.0.0.1:{port}")
            recv_monitor_message(events)
            self._socket.disable_monitor()

    async def __aenter__(self) -> "Voice":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close(linger=1000)  # what was said may still wait for the connection
        self._context.term()

    async def say(self, *messages: ToDaemon | bytes) -> None:
        for message in messages:
            frame = message if isinstance(message, bytes) else encode(message)
            named = self._link is not None and not isinstance(message, bytes | Hello)
            await self._socket.send_multipart([self._link, frame] if named else [frame])

    async def hear(self, within_s: float = 5.0) -> ToConnector:
        """The next message but Waiting, which needs no answer and comes at any time."""
        async with asyncio.timeout(within_s):
            while isinstance(message := await self.hear_any(within_s), Waiting):
                pass
            return message

    async def hear_any(self, within_s: float = 5.0) -> ToConnector:
        """The next message of any kind."""
        async with asyncio.timeout(within_s):
            return decode_for_connector(await self._socket.recv())

    async def ask(self, message: ToDaemon) -> ToConnector:
        await self.say(message)
        return await self.hear()

    async def hello(self, **fields: object) -> ToConnector:
        """Introduce oneself as what the daemon expects, but for the given fields."""
        return await self.ask(hello(**fields))

    async def hushed(self) -> None:
        """All that was said before has been handled, and nothing was answered but to this question."""
        refused = await self.hello(shard=1)
        assert isinstance(refused, Refused), refused


def sent(claim: SignedClaim, **fields: Any) -> Sent:
    """What a worker says when everything has been written, but for the given fields."""
    whole: dict[str, Any] = {"tokens": TOKENS, "blocks": LAYOUT.blocks_for(TOKENS), "bytes": LAYOUT.bytes_for(TOKENS)}
    given: dict[str, Any] = {"handoff_id": claim.claim.handoff_id, "epoch": claim.claim.epoch} | whole | fields
    return Sent(**given)


async def begun(daemon: Landing, worker: Voice, slot: int = 0) -> tuple[SignedClaim, Occupancy]:
    """A handoff that the daemon has accepted."""
    claim, held = daemon.claim(slot)
    accepted = await worker.ask(Begin(claim, TOKENS))
    assert accepted == Accepted(claim.claim.handoff_id, daemon.slots[slot].memory.address, LAYOUT.bytes_for(TOKENS))
    return claim, held
