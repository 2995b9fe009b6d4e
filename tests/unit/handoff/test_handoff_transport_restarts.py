"""A peer that died in a write and came back is reached again, on a port it had and on others."""

import hashlib
import json
import random
import socket
from contextlib import ExitStack, suppress

import pytest
import torch

from handoff.transport import Piece, Progress, Transport, TransportError
from handoff.transports import TransportName, open_transport
from tests.kit.far import SIZE, Far, far
from tests.kit.handoff import region, until


def ports() -> int:
    """The first of four neighbours that are free, below those that the system gives away: Mooncake takes no others."""
    chance = random.Random()
    while True:
        low = chance.randrange(18_000, 32_000)
        with ExitStack() as stack, suppress(OSError):
            for port in range(low, low + 4):
                stack.enter_context(socket.socket()).bind(("", port))
            return low


def on(low: int) -> dict[str, str]:
    """The environment that keeps a far end of Mooncake on this port and the next."""
    return {"MC_MIN_RPC_PORT": str(low), "MC_MAX_RPC_PORT": str(low + 1)}


def again(low: int, before: Far) -> int:
    """Where a far end has to start to get the data port of the one before, which had `low` and the next.

    The port of the handshake is the system's for a minute. So are those of NIXL, whose agents connect to themselves.
    """
    return low - 1 if json.loads(before.metadata)["address"].endswith(str(low + 1)) else low + 1


def whole(source: torch.Tensor, target: Far) -> list[Piece]:
    step = SIZE // 16
    return [Piece(source.data_ptr() + at, target.address + at, step) for at in range(0, SIZE, step)]


def filled(near: Transport, target: Far, source: torch.Tensor) -> bool:
    """Whether everything is there once it has been written."""
    transfer = near.write(near.connect(target.metadata), whole(source, target), region(source))
    until(lambda: transfer.poll() is Progress.DONE, within_s=20)
    transfer.close()
    return target.digest() == hashlib.sha256(source.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(("name", "moves"), [("nixl", True), ("mooncake", True), ("mooncake", False)])
def test_a_peer_that_comes_back_is_written_to(name: TransportName, moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    low = ports() + 1
    near = open_transport(name, "near")
    try:
        near.register([region(source)])
        with far(name, environment=on(low)) as target:
            had = target.listening()
            assert filled(near, target, source)
            peer = near.connect(target.metadata)
            target.stop()
            held = near.write(peer, whole(source, target), region(source))
            if not moves:
                near.disconnect(peer)  # first, or the system keeps the other end's data port for a minute too
            target.kill()
            with pytest.raises(TransportError):
                until(lambda: held.poll() is Progress.DONE)
            held.close()
            low = ports() if moves else again(low, target)
        with far(name, environment=on(low)) as target:
            assert bool(target.listening() & had) != moves
            assert filled(near, target, source)
            with pytest.raises(TransportError):  # the old one is not the new one
                near.write(peer, whole(source, target), region(source))
    finally:
        near.close()
