"""One-sided writes arrive byte for byte, what cannot be written fails, and a peer in trouble troubles nobody else."""

import hashlib
import os
import random
from collections.abc import Iterator

import pytest
import torch

from handoff.transport import Peer, Piece, Progress, Region, Transfer, Transport, TransportError
from handoff.transports import TransportName, open_transport
from tests.kit.far import SIZE, Far, far
from tests.kit.handoff import piece, region, until, written

MIB = 1 << 20


def noise(size: int = MIB) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.fixture(params=["nixl", "nixl over TCP", "mooncake"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TransportName:
    """NIXL takes shared memory on one host; between hosts without RDMA it takes TCP."""
    if request.param == "nixl over TCP":
        monkeypatch.setenv("UCX_TLS", "tcp")
    return "mooncake" if request.param == "mooncake" else "nixl"


@pytest.fixture
def near(name: TransportName) -> Iterator[Transport]:
    transport = open_transport(name, "near")
    yield transport
    transport.close()


@pytest.fixture
def there(name: TransportName) -> Iterator[Transport]:
    """The other end, in the same process."""
    transport = open_transport(name, "there", attend=lambda: True)
    yield transport
    transport.close()


def whole(source: torch.Tensor, target: Far, parts: int = 16) -> list[Piece]:
    """All of the far memory, in `parts`: several for each of the connections that a transport may have."""
    step = SIZE // parts
    return [Piece(source.data_ptr() + at, target.address + at, step) for at in range(0, SIZE, step)]


def digest(source: torch.Tensor) -> str:
    return hashlib.sha256(source.numpy().tobytes()).hexdigest()


def finished(transfer: Transfer) -> None:
    until(lambda: transfer.poll() is Progress.DONE, within_s=20)
    transfer.close()


def needs_the_peer(name: TransportName) -> bool:
    """Shared memory can be written while the process that owns it is stopped."""
    return name == "mooncake" or os.environ.get("UCX_TLS") == "tcp"


def ended(transfer: Transfer) -> bool:
    """Whether a write has come to its end, good or bad."""
    try:
        return transfer.poll() is Progress.DONE
    except TransportError:
        return True


def test_several_pieces_land_where_they_belong(near: Transport, there: Transport) -> None:
    source, target = noise(), torch.zeros(MIB, dtype=torch.uint8)
    near.register([region(source)])
    there.register([region(target)])
    cuts = [(0, 700_000, 1), (300_000, 0, 4096), (5, 100_001, 99_999)]  # from, to, bytes
    expected = torch.zeros_like(target)
    for start, end, length in cuts:
        expected[end : end + length] = source[start : start + length]
    pieces = [piece(source, target.data_ptr() + end, offset=start, length=length) for start, end, length in cuts]
    written(near, near.connect(there.metadata()), pieces, source)
    assert torch.equal(target, expected)


def test_a_write_is_done_once_its_thousands_of_pieces_are_in_the_other_process(name: TransportName, near: Transport) -> None:
    chance = random.Random(7)
    source, expected = noise(), torch.zeros(SIZE, dtype=torch.uint8)
    near.register([region(source)])
    with far(name) as target:
        peer = near.connect(target.metadata)
        for _ in range(2):
            places = sorted(chance.sample(range(SIZE), 3_000))
            pieces = []
            for place, end in zip(places, [*places[1:], SIZE], strict=True):
                length = chance.randint(1, min(end - place, 40_000))
                start = chance.randrange(MIB - length)
                expected[place : place + length] = source[start : start + length]
                pieces.append(piece(source, target.address + place, offset=start, length=length))
            chance.shuffle(pieces)
            finished(near.write(peer, pieces, region(source)))
            assert target.digest() == digest(expected)


def test_a_peers_connections_are_kept(name: TransportName, near: Transport) -> None:
    source = noise(SIZE)
    near.register([region(source)])
    with far(name) as target:
        peer = near.connect(target.metadata)
        for _ in range(3):
            finished(near.write(peer, whole(source, target), region(source)))
        kept = set(os.listdir("/proc/self/fd"))
        for _ in range(30):
            written(near, peer, [piece(source, target.address, length=4096)] * 3, source)
            assert near.connect(target.metadata) == peer
        assert set(os.listdir("/proc/self/fd")) == kept


def test_memory_that_was_never_registered_cannot_be_written(near: Transport, there: Transport) -> None:
    source, target, other = noise(), torch.zeros(MIB, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    near.register([region(source)])
    there.register([region(target)])
    peer = near.connect(there.metadata())
    with pytest.raises(TransportError, match=f"cannot write to {peer}"):
        near.write(peer, [piece(source, other.data_ptr(), length=4096)], region(source))
    with pytest.raises(TransportError, match="cannot write"):
        near.write(peer, [piece(source, target.data_ptr() + 1)], region(source))  # one byte over the end
    assert not other.any()
    written(near, peer, [piece(source, target.data_ptr())], source)
    assert torch.equal(target, source)


def test_memory_that_was_never_registered_cannot_be_read(near: Transport, there: Transport) -> None:
    source, target = noise(), torch.zeros(MIB, dtype=torch.uint8)
    there.register([region(target)])
    with pytest.raises(TransportError):
        near.write(near.connect(there.metadata()), [piece(source, target.data_ptr())], region(source))


def test_a_peer_that_connects_after_memory_was_withdrawn_cannot_write_there(near: Transport, there: Transport) -> None:
    source, old, new = noise(), torch.zeros(MIB, dtype=torch.uint8), torch.zeros(MIB, dtype=torch.uint8)
    near.register([region(source)])
    there.register([region(old)])
    there.unregister([region(old)])
    there.unregister([region(old)])
    there.register([region(new)])
    peer = near.connect(there.metadata())
    with pytest.raises(TransportError, match="cannot write"):
        near.write(peer, [piece(source, old.data_ptr())], region(source))
    written(near, peer, [piece(source, new.data_ptr())], source)
    assert torch.equal(new, source)


def test_a_known_peer_is_asked_again_for_what_it_has_registered_since(near: Transport, there: Transport) -> None:
    source, first, second = noise(), torch.zeros(MIB, dtype=torch.uint8), torch.zeros(MIB, dtype=torch.uint8)
    near.register([region(source)])
    there.register([region(first)])
    peer = near.connect(there.metadata())
    there.register([region(second)])
    assert near.connect(there.metadata()) == peer
    for target in (first, second):
        written(near, peer, [piece(source, target.data_ptr())], source)
        assert torch.equal(target, source)


def test_a_forgotten_peer_cannot_be_written_to_until_it_is_connected_again(near: Transport, there: Transport) -> None:
    source, target = noise(), torch.zeros(MIB, dtype=torch.uint8)
    near.register([region(source)])
    there.register([region(target)])
    peer = near.connect(there.metadata())
    near.disconnect(peer)
    near.disconnect(peer)
    near.disconnect(Peer("nobody"))
    with pytest.raises(TransportError, match="cannot write"):
        near.write(peer, [piece(source, target.data_ptr())], region(source))
    written(near, near.connect(there.metadata()), [piece(source, target.data_ptr())], source)
    assert torch.equal(target, source)


def test_metadata_that_is_none_is_refused(near: Transport) -> None:
    with pytest.raises(TransportError, match="cannot connect"):
        near.connect(b"garbage")


def test_memory_of_a_device_that_is_not_there_cannot_be_registered(near: Transport) -> None:
    source = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(TransportError, match=r"cannot register|GPU 99"):
        near.register([Region(source.data_ptr(), source.numel(), device=99)])


def test_closing_twice_is_closing_once(name: TransportName, there: Transport) -> None:
    transport = open_transport(name, "near")
    source, target = noise(), torch.zeros(MIB, dtype=torch.uint8)
    transport.register([region(source), region(source)])
    there.register([region(target)])
    transfer = transport.write(transport.connect(there.metadata()), [piece(source, target.data_ptr())], region(source))
    until(lambda: transfer.poll() is Progress.DONE)
    transfer.close()
    transfer.close()
    transport.close()
    transport.close()


def test_a_transfer_given_up_at_once_may_be_closed(near: Transport, there: Transport) -> None:
    source, target = noise(1 << 24), torch.zeros(1 << 24, dtype=torch.uint8)
    near.register([region(source)])
    there.register([region(target)])
    peer = near.connect(there.metadata())
    pieces = [Piece(source.data_ptr() + at, target.data_ptr() + at, 1 << 13) for at in range(0, 1 << 24, 1 << 13)]
    for _ in range(3):
        near.write(peer, pieces, region(source)).close()
    written(near, peer, pieces, source)
    assert torch.equal(target, source)


def test_a_stopped_peer_delays_its_own_write_alone(name: TransportName, near: Transport) -> None:
    source = noise(SIZE)
    near.register([region(source)])
    with far(name, "stopped") as stopped, far(name, "running") as running:
        peers = near.connect(stopped.metadata), near.connect(running.metadata)
        for peer, target in zip(peers, (stopped, running), strict=True):
            written(near, peer, [piece(source, target.address, length=4096)], source)
        stopped.stop()
        held = near.write(peers[0], whole(source, stopped), region(source))
        for _ in range(30):
            assert ended(held) != needs_the_peer(name)
            written(near, peers[1], [piece(source, running.address, length=MIB)] * 3, source)
        stopped.go_on()
        finished(held)
        assert stopped.digest() == digest(source)


def test_a_peer_stopped_before_it_is_connected_delays_nobody(name: TransportName, near: Transport) -> None:
    source = noise(SIZE)
    near.register([region(source)])
    with far(name, "stopped") as stopped, far(name, "running") as running:
        peer = near.connect(running.metadata)
        stopped.stop()
        late = near.connect(stopped.metadata)
        held = near.write(late, whole(source, stopped), region(source))
        for _ in range(30):
            assert not ended(held)
            written(near, peer, [piece(source, running.address, length=MIB)] * 3, source)
        stopped.go_on()
        finished(held)
        assert stopped.digest() == digest(source)


def test_a_peer_killed_in_a_write_fails_its_own_writes_alone(name: TransportName, near: Transport) -> None:
    source = noise(SIZE)
    near.register([region(source)])
    with far(name, "killed") as killed, far(name, "running") as running:
        peers = near.connect(killed.metadata), near.connect(running.metadata)
        for peer, target in zip(peers, (killed, running), strict=True):
            written(near, peer, [piece(source, target.address, length=4096)], source)
        killed.stop()
        held = near.write(peers[0], whole(source, killed), region(source))
        killed.kill()
        other = near.write(peers[1], whole(source, running), region(source))
        until(lambda: ended(held))
        finished(other)
        assert running.digest() == digest(source)
        with pytest.raises(TransportError, match="killed"):
            written(near, peers[0], [piece(source, killed.address)], source)
        near.disconnect(peers[0])
        written(near, peers[1], [piece(source, running.address)], source)


def test_a_write_under_way_to_a_peer_that_is_forgotten_comes_to_an_end(name: TransportName, near: Transport) -> None:
    source = noise(SIZE)
    near.register([region(source)])
    with far(name, "stopped") as stopped, far(name, "running") as running:
        peers = near.connect(stopped.metadata), near.connect(running.metadata)
        written(near, peers[0], [piece(source, stopped.address, length=4096)], source)
        stopped.stop()
        held = near.write(peers[0], whole(source, stopped), region(source))
        near.disconnect(peers[0])
        until(lambda: ended(held))
        held.close()
        written(near, peers[1], [piece(source, running.address)], source)
