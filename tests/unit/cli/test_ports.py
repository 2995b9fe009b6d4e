import socket
from dataclasses import astuple
from itertools import islice

import pytest

from cli.ports import PortUse, choose_ports, free_ports, refuse_busy_ports
from cli.settings import LocalSettings
from process.errors import PortBusyError


def flat(*numbers: int | tuple[int, ...]) -> list[int]:
    return [n for entry in numbers for n in (entry if isinstance(entry, tuple) else (entry,))]


def test_fixed_ports_are_those_of_the_settings_and_daemons_take_consecutive_ones() -> None:
    ports = choose_ports(LocalSettings(daemons=2, decode_port=6000, decode_metrics_port=7000, public_port=8080))
    assert ports.public == 8080
    assert (ports.decode, ports.control, ports.decode_metrics) == ((6000, 6002), (6001, 6003), (7000, 7001))


def test_automatic_ports_are_free_and_all_different() -> None:
    numbers = flat(*astuple(choose_ports(LocalSettings(ports="auto", daemons=3))))
    assert len(set(numbers)) == len(numbers) == 8 + 3 * 3
    refuse_busy_ports(PortUse(number, "x", "y", "--z") for number in numbers)


def test_a_busy_port_is_refused_with_who_wanted_it_and_the_flag_that_moves_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortBusyError, match=f"port {port} is in use, but vllm needs it .its API.*--vllm-port PORT"):
            refuse_busy_ports([PortUse(port, "vllm", "its API", "--vllm-port")])


def test_every_busy_port_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [server.getsockname()[1] for server in (one, two)]
        with pytest.raises(PortBusyError) as refused:
            refuse_busy_ports(PortUse(port, "envoy", "clients", "--public-port") for port in ports)
    assert all(f"port {port}" in str(refused.value) for port in ports)


def test_a_port_that_two_processes_want_is_refused_with_both_flags() -> None:
    (port,) = islice(free_ports(), 1)
    uses = [PortUse(port, "redis", "leases", "--redis-port"), PortUse(port, "vllm", "its API", "--vllm-port")]
    with pytest.raises(PortBusyError, match=r"wanted twice, by redis .* and vllm .*--redis-port or --vllm-port"):
        refuse_busy_ports(uses)
