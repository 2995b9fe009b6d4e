"""The far end of a transport in a process of its own, and the words to speak with it."""

import ctypes
import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from pyroute2 import IPRoute

from handoff.transport import Region
from handoff.transports import TransportName, open_transport

ROOT = Path(__file__).parents[2]
SIZE = 1 << 26
_MARK = "far:"  # libraries log to the same stream


class Far:
    """A process with SIZE bytes of zeros that may be written to."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.pid = process.pid
        self.metadata = b""
        self.address = 0

    def listen(self) -> None:
        """Wait until it may be connected to."""
        told = json.loads(self.heard())
        self.metadata, self.address = bytes.fromhex(told["metadata"]), told["address"]

    def say(self, word: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self.heard()

    def heard(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return line.removeprefix(_MARK).strip()
        raise AssertionError("the far process has ended")

    def digest(self) -> str:
        """Of all its memory."""
        return self.say("digest")

    def listening(self) -> set[int]:
        """The TCP ports on which it answers."""
        own = {str(name.readlink()) for name in Path(f"/proc/{self.pid}/fd").iterdir()}
        tables = [Path(f"/proc/{self.pid}/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
        rows = [row.split() for table in tables for row in table]
        return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}

    def stop(self) -> None:
        """Returns when none of its threads runs any more."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Returns when it is gone, with its connections."""
        self._process.kill()
        self._process.wait(10)


@contextmanager
def far(
    name: TransportName,
    label: str = "target",
    *,
    host: str = "127.0.0.1",
    through: list[str] | None = None,
    interface: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Far]:
    """A far end. With an `interface`, that gets the address `host` once `say` has said anything; then call `listen`."""
    words = [*(through or []), sys.executable, "-m", "tests.kit.far", name, label, host, *([interface] if interface else [])]
    with subprocess.Popen(
        words,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    ) as process:
        try:
            other = Far(process)
            if interface is None:
                other.listen()
            yield other
        finally:
            process.kill()  # ends a process that was stopped too
            process.wait(10)


def give_address(interface: str, address: str) -> None:
    """Bring an interface of this process's network up, and the loopback."""
    with IPRoute() as network:
        index = network.link_lookup(ifname=interface)[0]
        network.addr("add", index=index, address=address, prefixlen=24)
        network.link("set", index=index, state="up")
        network.link("set", index=network.link_lookup(ifname="lo")[0], state="up")


def wait_for_carrier(interface: str, within_s: float = 5.0) -> None:
    """Returns once the other end of the cable is up too: UCX does not look at an interface before."""
    deadline = time.monotonic() + within_s
    with IPRoute() as network:
        index = network.link_lookup(ifname=interface)[0]
        while network.get_links(index)[0].get("operstate") != "UP":
            assert time.monotonic() < deadline, f"{interface} is not up"
            time.sleep(0.001)


def _tell(what: str) -> None:
    print(f"{_MARK} {what}", flush=True)


def main(name: str, label: str, host: str, interface: str | None = None) -> None:
    """Answer each line of stdin, until it ends."""
    if interface is not None:
        _tell("here")
        sys.stdin.readline()
        give_address(interface, host)
        wait_for_carrier(interface)
        _tell("connected")
    memory = mmap.mmap(-1, SIZE)
    region = Region(ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)), SIZE)
    transport = open_transport(cast(TransportName, name), label, attend=lambda: True, host=host)
    transport.register([region])
    _tell(json.dumps({"metadata": transport.metadata().hex(), "address": region.address}))
    for line in sys.stdin:
        if line.strip() == "withdraw":
            transport.unregister([region])
            _tell("withdrawn")
        else:
            _tell(hashlib.sha256(memory).hexdigest())
    transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
