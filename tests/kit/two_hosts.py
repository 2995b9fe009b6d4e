"""Two hosts on one machine: this process's network and another, joined by a virtual cable. Run by `own_network()`."""

import ctypes
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import cast

from pyroute2 import IPRoute

from handoff.transport import Piece, Progress, Region, Transfer, TransportError
from handoff.transports import TransportName, open_transport
from tests.kit.far import SIZE, far, give_address, wait_for_carrier

NEAR, FAR = "192.0.2.1", "192.0.2.2"  # RFC 5737: for documentation, so never a real network's


def own_network() -> list[str]:
    """The command that runs another one in a new network, root or not."""
    root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    # UCX looks into /sys for its interfaces, which shows those of the network that it was mounted in.
    return ["unshare", *root, "--net", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh"]


def carried(interface: str) -> int:
    """Bytes that an interface of this network has sent."""
    table = Path("/proc/self/net/dev").read_text().splitlines()
    row = next(line for line in table if line.strip().startswith(f"{interface}:"))
    return int(row.split(":")[1].split()[8])


def content() -> bytearray:
    """What is written."""
    return bytearray(random.Random(11).randbytes(SIZE))


def outcome(transfer: Transfer, within_s: float = 20.0) -> str:
    """How a write ended: "done", or its error."""
    deadline = time.monotonic() + within_s
    try:
        while transfer.poll() is not Progress.DONE:
            assert time.monotonic() < deadline, "the write does not end"
            time.sleep(0.001)
    except TransportError as error:
        return str(error)
    finally:
        transfer.close()
    return "done"


def main(name: TransportName) -> None:
    """Write to a process on the other host, then kill it in a write; prints what was seen."""
    source = content()
    region = Region(ctypes.addressof(ctypes.c_ubyte.from_buffer(source)), SIZE)
    with far(name, host=FAR, through=own_network(), interface="far") as target:
        assert target.heard() == "here"
        with IPRoute() as network:
            network.link("add", ifname="near", kind="veth", peer={"ifname": "far", "net_ns_pid": target.pid})
        give_address("near", NEAR)
        assert target.say("the cable is in") == "connected"
        wait_for_carrier("near")
        target.listen()
        near = open_transport(name, "near", host=NEAR)
        try:
            near.register([region])
            peer = near.connect(target.metadata)
            before = carried("near")
            step = SIZE // 64
            pieces = [Piece(region.address + at, target.address + at, step) for at in range(0, SIZE, step)]
            first = outcome(near.write(peer, pieces, region))
            seen = {"first": first, "digest": target.digest(), "sent": carried("near") - before}
            target.stop()
            held = near.write(peer, pieces, region)
            target.kill()
            print(json.dumps({**seen, "second": outcome(held)}))
        finally:
            near.close()


if __name__ == "__main__":
    main(cast(TransportName, sys.argv[1]))
