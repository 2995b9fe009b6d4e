"""Which ports the stack takes, and whether they can be had."""

import random
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from cli.settings import LocalSettings
from process.errors import PortBusyError

# Below Linux's default range for outgoing connections, which could take a port between our look and our use.
AUTO_RANGE = range(20000, 32000)


@dataclass(frozen=True)
class Ports:
    """TCP ports of one stack; the last three have one entry for each decode daemon."""

    public: int
    internal: int
    admin: int
    redis: int
    vllm: int
    connector_metrics: int
    extproc: int
    extproc_metrics: int
    decode: tuple[int, ...]
    control: tuple[int, ...]
    decode_metrics: tuple[int, ...]


@dataclass(frozen=True)
class PortUse:
    """One port that a process will listen on; `flag` is the setting that moves it."""

    number: int
    process: str
    purpose: str
    flag: str


def choose_ports(settings: LocalSettings) -> Ports:
    """The ports that the settings name, or free ones with `ports = "auto"`.

    Raises:
        PortBusyError: no free ports are left to pick.
    """
    count = settings.daemons
    if settings.ports == "auto":
        free = free_ports()
        public, internal, admin, redis, vllm, connector_metrics, extproc, extproc_metrics = islice(free, 8)
        decode, control, decode_metrics = (tuple(islice(free, count)) for _ in range(3))
        singles = (public, internal, admin, redis, vllm, connector_metrics, extproc, extproc_metrics)
        return Ports(*singles, decode, control, decode_metrics)
    return Ports(
        public=settings.public_port,
        internal=settings.internal_port,
        admin=settings.admin_port,
        redis=settings.redis_port,
        vllm=settings.vllm_port,
        connector_metrics=settings.connector_metrics_port,
        extproc=settings.extproc_port,
        extproc_metrics=settings.extproc_metrics_port,
        decode=tuple(settings.decode_port + 2 * i for i in range(count)),
        control=tuple(settings.decode_port + 2 * i + 1 for i in range(count)),
        decode_metrics=tuple(settings.decode_metrics_port + i for i in range(count)),
    )


def refuse_busy_ports(uses: Iterable[PortUse], host: str = "127.0.0.1") -> None:
    """Check that every port can be had and is wanted once.

    Raises:
        PortBusyError: naming each port that cannot be had, what wanted it and the flag that moves it.
    """
    wanted: dict[int, PortUse] = {}
    complaints = []
    for use in uses:
        if other := wanted.get(use.number):
            complaints.append(
                f"port {use.number} is wanted twice, by {other.process} ({other.purpose}) and {use.process} "
                f"({use.purpose}): move one with {other.flag} or {use.flag}"
            )
        elif not _is_free(host, use.number):
            complaints.append(
                f"port {use.number} is in use, but {use.process} needs it ({use.purpose}): stop what listens "
                f"there, move ours with {use.flag} PORT, or take free ports with --ports auto"
            )
        wanted[use.number] = use
    if complaints:
        raise PortBusyError("\n".join(complaints))


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def free_ports() -> Iterator[int]:
    """Ports of this machine that nothing listens on now, in random order.

    Raises:
        PortBusyError: none are left.
    """
    for port in random.sample(AUTO_RANGE, len(AUTO_RANGE)):
        if _is_free("127.0.0.1", port):
            yield port
    raise PortBusyError(f"no free port between {AUTO_RANGE.start} and {AUTO_RANGE.stop}")
