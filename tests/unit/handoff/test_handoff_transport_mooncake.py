"""Mooncake's own ways: what it is missing when it does not load, peers that do not answer, what its ports give away."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from handoff.mooncake import MooncakeTransport
from handoff.mooncake_engine import load_engines, start_engine, wake_engine
from handoff.transport import TransportError
from tests.kit.far import ROOT, far
from tests.kit.handoff import piece, region, until, written

OPEN = "from handoff.transports import open_transport; open_transport('mooncake', 'here')"


@pytest.fixture
def near() -> Iterator[MooncakeTransport]:
    transport = MooncakeTransport("near")
    yield transport
    transport.close()


def opened_with(packages: Path) -> str:
    """What a process says that opens the transport and finds these packages first."""
    path = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(
        [sys.executable, "-c", OPEN], cwd=ROOT, env=path, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    assert "pip install 'anchorleg[mooncake]'" in opened_with(tmp_path)


def test_without_a_shared_library_debians_packages_are_named(tmp_path: Path) -> None:
    found = find_spec("mooncake.engine")
    assert found is not None
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "engine.so").symlink_to(str(found.origin))  # far from the libraries that its wheel brings
    said = opened_with(tmp_path)
    assert "cannot open shared object file" in said
    assert "apt install libibverbs1 libnuma1 libcurl4" in said


def test_a_peer_that_takes_the_connection_and_says_nothing_fails_in_time(
    near: MooncakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handoff.mooncake._CONNECT_S", 0.2)
    source = torch.zeros(16, dtype=torch.uint8)
    near.register([region(source)])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        told = {"label": "silent", "address": address, "regions": [(source.data_ptr(), 16)]}
        peer = near.connect(msgspec.json.encode(told))
        with pytest.raises(TransportError, match=r"silent: no connection within 0\.2 s"):
            written(near, peer, [piece(source, source.data_ptr())], source)


def test_a_peer_that_is_not_there_is_named_with_its_address(near: MooncakeTransport) -> None:
    source = torch.zeros(16, dtype=torch.uint8)
    near.register([region(source)])
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    peer = near.connect(msgspec.json.encode({"label": "gone", "address": address, "regions": [(source.data_ptr(), 16)]}))
    with pytest.raises(TransportError, match=f"gone: no Mooncake answers at {address}"):
        written(near, peer, [piece(source, source.data_ptr())], source)


def test_what_is_registered_to_be_sent_can_be_written_by_nobody(near: MooncakeTransport) -> None:
    source, other = torch.ones(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    near.register([region(source)])
    before = _listening()
    with far("mooncake") as target:
        written(near, near.connect(target.metadata), [piece(source, target.address)], source)
        ends = _listening() - before
        stranger = start_engine(load_engines(), "127.0.0.1")
        batches = [
            stranger.transfer_submit_write(f"127.0.0.1:{port}", other.data_ptr(), source.data_ptr(), 4096) for port in ends
        ]
        answers = [_answer(stranger, batch) for batch in batches if batch]  # of the ports that are not for data
        wake_engine(stranger)
        del stranger
    assert len(answers) >= 2  # this end's, and the far one's
    assert set(answers) == {-1}
    assert source.all()


def _answer(engine: Any, batch: int) -> int:
    states: list[int] = []
    until(lambda: states.append(engine.transfer_check_status(batch)) or states[-1] != 0)  # type: ignore[func-returns-value]
    return states[-1]


def _listening() -> set[int]:
    """Ports in Mooncake's range on which somebody answers on this machine."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    ports = {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"}
    return {port for port in ports if 15_000 <= port <= 17_000}


def test_an_end_with_several_peers_is_closed_without_a_pause() -> None:
    source = torch.zeros(16, dtype=torch.uint8)
    ends = [MooncakeTransport(f"end {number}") for number in range(4)]
    for end in ends:
        end.register([region(source)])
    for end in ends:
        peers = [end.connect(other.metadata()) for other in ends if other is not end]
        for peer in peers:
            written(end, peer, [piece(source, source.data_ptr())], source)
    began = time.monotonic()
    for end in ends:
        end.close()
    assert time.monotonic() - began < 8  # sixteen engines; one alone takes a second when it is not woken
