"""On whose account a request takes a slot: named by a header that the operator's own proxy sets.

The proxy must overwrite what a client sends under that name; the gateway cannot tell the two apart. A header that came twice is
one name, its values joined by a comma. Requests without a name share one account: leaving the header out gets nobody around the
limits.
"""

import hashlib

from gateway.settings import GatewaySettings
from leases import Tenant

NAMELESS = "-"
_LONGEST_NAME = 256
_SHOWN = 192


def tenant_of(value: str | None, settings: GatewaySettings) -> Tenant | None:
    """Return the account of a request whose tenant header has this value; None where there are no tenants."""
    if not settings.tenant_header:
        return None
    name = (value or "").strip() or NAMELESS
    if len(name) > _LONGEST_NAME:
        # Longer than any name that stands for itself, so that no other value is this one; the hash keeps long ones apart.
        name = f"{name[:_SHOWN]}#{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}"
    return Tenant(name, max_leases=settings.tenant_max_leases, max_waiting=settings.tenant_max_waiting)
