"""The transports there are, by name."""

from collections.abc import Callable
from typing import Literal

from handoff.transport import Transport

TransportName = Literal["nixl", "mooncake"]


def open_transport(
    name: TransportName, label: str, *, attend: Callable[[], bool] = lambda: False, host: str | None = None
) -> Transport:
    """Start this process's end of a transport. Raises TransportError, which names what to install where something is missing.

    `label` names this end in the peers' errors and logs. `attend` tells whether a peer may be writing here now (see
    NixlTransport). `host` is the address that peers reach this process at, None where nobody writes here from another machine;
    NIXL finds its addresses by itself.
    """
    # The libraries take up to a second to load, and need not both be there.
    if name == "mooncake":
        from handoff.mooncake import MooncakeTransport

        return MooncakeTransport(label, host=host)
    from handoff.nixl import NixlTransport

    return NixlTransport(label, attend)
