"""One-sided writes arrive byte for byte, and what cannot be written fails at once."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from handoff.transport import NixlTransport, Peer, Piece, Progress, Region, TransportError
from tests.kit.handoff import piece, region, until, written

ROOT = Path(__file__).parents[3]
SIZE = 1 << 20

# The other process: prints its metadata and address, then answers each line on stdin with a digest of what has landed.
TARGET = """
import ctypes, hashlib, sys
from handoff.transport import NixlTransport, Region
transport = NixlTransport("target")
buffer = (ctypes.c_ubyte * (1 << 20))()
region = Region(ctypes.addressof(buffer), len(buffer))
transport.register([region])
print(transport.metadata().hex(), region.address, flush=True)
for line in sys.stdin:
    print(hashlib.sha256(buffer).hexdigest(), flush=True)
transport.close()
"""


def noise(size: int = SIZE) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.fixture
def near() -> Iterator[NixlTransport]:
    transport = NixlTransport("near")
    yield transport
    transport.close()


@pytest.fixture
def far() -> Iterator[NixlTransport]:
    transport = NixlTransport("far")
    yield transport
    transport.close()


def test_several_pieces_land_where_they_belong(near: NixlTransport, far: NixlTransport) -> None:
    source, target = noise(), torch.zeros(SIZE, dtype=torch.uint8)
    near.register([region(source)])
    far.register([region(target)])
    cuts = [(0, 700_000, 1), (300_000, 0, 4096), (5, 100_001, 99_999)]  # from, to, bytes
    expected = torch.zeros_like(target)
    for start, end, length in cuts:
        expected[end : end + length] = source[start : start + length]
    pieces = [piece(source, target.data_ptr() + end, offset=start, length=length) for start, end, length in cuts]
    written(near, near.connect(far.metadata()), pieces, source)
    assert torch.equal(target, expected)


def test_two_processes_see_the_same_bytes(near: NixlTransport) -> None:
    import hashlib

    source = noise()
    near.register([region(source)])
    command = [sys.executable, "-c", TARGET]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            metadata, address = _hello(process.stdout)
            peer = near.connect(metadata)
            half = SIZE // 2
            pieces = [piece(source, address + half, offset=half, length=half), piece(source, address, length=half)]
            written(near, peer, pieces, source)
            process.stdin.write("look\n")
            process.stdin.flush()
            assert process.stdout.readline().strip() == hashlib.sha256(bytes(source.tolist())).hexdigest()
            process.stdin.close()
            assert process.wait(10) == 0
        finally:
            process.kill()


def test_a_write_to_a_process_that_has_died_fails_within_a_bound(near: NixlTransport) -> None:
    source = noise()
    near.register([region(source)])
    command = [sys.executable, "-c", TARGET]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            metadata, address = _hello(process.stdout)
            peer = near.connect(metadata)
            written(near, peer, [piece(source, address)], source)
        finally:
            process.kill()
            process.wait(10)
    with pytest.raises(TransportError, match="target"):
        written(near, peer, [piece(source, address)], source)
    near.disconnect(peer)


def _hello(stdout: object) -> tuple[bytes, int]:
    for line in stdout:  # type: ignore[attr-defined]
        words = line.split()
        if len(words) == 2 and words[1].isdigit():  # NIXL logs to the same stream
            return bytes.fromhex(words[0]), int(words[1])
    raise AssertionError("the target process ended at start")


def test_memory_that_was_never_registered_cannot_be_written(near: NixlTransport, far: NixlTransport) -> None:
    source, target, other = noise(), torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    near.register([region(source)])
    far.register([region(target)])
    peer = near.connect(far.metadata())
    with pytest.raises(TransportError, match=f"cannot write to {peer}"):
        near.write(peer, [piece(source, other.data_ptr(), length=4096)], region(source))
    with pytest.raises(TransportError, match="cannot write"):
        near.write(peer, [piece(source, target.data_ptr() + 1)], region(source))  # one byte over the end
    assert not other.any()


def test_memory_that_was_never_registered_cannot_be_read(near: NixlTransport, far: NixlTransport) -> None:
    source, target = noise(), torch.zeros(SIZE, dtype=torch.uint8)
    far.register([region(target)])
    with pytest.raises(TransportError):
        near.write(near.connect(far.metadata()), [piece(source, target.data_ptr())], region(source))


def test_a_peer_that_connects_after_memory_was_withdrawn_cannot_write_there(near: NixlTransport, far: NixlTransport) -> None:
    source, old, new = noise(), torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    near.register([region(source)])
    far.register([region(old)])
    far.unregister([region(old)])
    far.unregister([region(old)])
    far.register([region(new)])
    peer = near.connect(far.metadata())
    with pytest.raises(TransportError, match="cannot write"):
        near.write(peer, [piece(source, old.data_ptr())], region(source))
    written(near, peer, [piece(source, new.data_ptr())], source)
    assert torch.equal(new, source)


def test_a_known_peer_is_asked_again_for_what_it_has_registered_since(near: NixlTransport, far: NixlTransport) -> None:
    source, first, second = noise(), torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    near.register([region(source)])
    far.register([region(first)])
    peer = near.connect(far.metadata())
    far.register([region(second)])
    assert near.connect(far.metadata()) == peer
    for target in (first, second):
        written(near, peer, [piece(source, target.data_ptr())], source)
        assert torch.equal(target, source)


def test_a_forgotten_peer_cannot_be_written_to_until_it_is_connected_again(near: NixlTransport, far: NixlTransport) -> None:
    source, target = noise(), torch.zeros(SIZE, dtype=torch.uint8)
    near.register([region(source)])
    far.register([region(target)])
    peer = near.connect(far.metadata())
    near.disconnect(peer)
    near.disconnect(peer)
    near.disconnect(Peer("nobody"))
    with pytest.raises(TransportError, match="cannot write"):
        near.write(peer, [piece(source, target.data_ptr())], region(source))
    written(near, near.connect(far.metadata()), [piece(source, target.data_ptr())], source)
    assert torch.equal(target, source)


def test_metadata_that_is_none_is_refused(near: NixlTransport) -> None:
    with pytest.raises(TransportError, match="cannot connect"):
        near.connect(b"garbage")


def test_memory_of_a_device_that_is_not_there_cannot_be_registered(near: NixlTransport) -> None:
    source = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(TransportError, match="cannot register"):
        near.register([Region(source.data_ptr(), source.numel(), device=99)])


def test_closing_twice_is_closing_once(far: NixlTransport) -> None:
    transport = NixlTransport("near")
    source, target = noise(), torch.zeros(SIZE, dtype=torch.uint8)
    transport.register([region(source), region(source)])
    far.register([region(target)])
    transfer = transport.write(transport.connect(far.metadata()), [piece(source, target.data_ptr())], region(source))
    until(lambda: transfer.poll() is Progress.DONE)
    transfer.close()
    transfer.close()
    transport.close()
    transport.close()


def test_a_transfer_given_up_at_once_may_be_closed(near: NixlTransport, far: NixlTransport) -> None:
    source, target = noise(1 << 24), torch.zeros(1 << 24, dtype=torch.uint8)
    near.register([region(source)])
    far.register([region(target)])
    peer = near.connect(far.metadata())
    pieces = [Piece(source.data_ptr() + at, target.data_ptr() + at, 1 << 16) for at in range(0, 1 << 24, 1 << 16)]
    for _ in range(3):
        near.write(peer, pieces, region(source)).close()
    written(near, peer, pieces, source)
    assert torch.equal(target, source)
