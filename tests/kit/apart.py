"""A decode daemon in a process of its own, for a test to stop, to kill and to start again."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc.aio
import httpx
from prometheus_client.parser import text_string_to_metric_families

from cli.ports import free_ports
from handoff.claim import ClaimKeys
from handoff.decode_pb2_grpc import DecoderStub
from leases import LeaseTable
from tests.kit.doors import Door
from tests.kit.lane import until
from tests.kit.prefills import CONTEXT, NAME, SLOW_WIRE
from tests.kit.valkey import ValkeyProcess

_START_S = 60.0
SHORT = {"writer_grace_s": 2.0, "drain_timeout_s": 5.0, "log_format": "json"}


class Apart:
    """The daemon, and the table that it is in. A killed one keeps its ports for the next."""

    def __init__(
        self,
        model_dir: Path,
        table: LeaseTable,
        redis_url: str,
        secret: str,
        log: Path,
        *,
        program: str = "cli.main",
        environment: Mapping[str, str] = MappingProxyType(SLOW_WIRE),
        **settings: Any,
    ) -> None:
        """`program` is the module that is `anchorleg`."""
        self.log = log
        self._program = program
        self._environment = environment
        self._table = table
        self._secret = secret
        given = {"served_model_name": NAME, "model_dir": model_dir, "context_tokens": CONTEXT, "dtype": "float32"}
        given |= {"threads": 1, "redis_url": redis_url} | SHORT | settings
        self._flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        self._flags.append("--no-pin-threads")
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._ports: tuple[int, int, int] = (0, 0, 0)
        self._door: Door | None = None

    @property
    def door(self) -> Door:
        assert self._door is not None, "the daemon has not been started"
        return self._door

    @property
    def control_port(self) -> int:
        return self._ports[1]

    async def start(self, *, elsewhere: bool = True) -> None:
        """Start it, on other ports or on those that it had; returns when the table has it, and no other."""
        if elsewhere:
            first, second, third = islice(free_ports(), 3)
            self._ports = first, second, third
        self._spawn()
        stream = self._ports[0]
        cards: list[str] = []

        async def alone() -> bool:
            assert self.runs, f"the daemon has ended (see {self.log})"
            report = (await self._table.inspect()).get(NAME)
            nodes = [one.node for one in report.nodes] if report else []
            cards[:] = [node.card for node in nodes]
            return [node.decode_endpoint for node in nodes] == [f"127.0.0.1:{stream}"] and await self.free()

        await until(alone, f"the daemon is in the table (see {self.log})", _START_S)
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{stream}")
        keys = ClaimKeys([self._secret.encode()])
        self._door = Door(card=cards[0], stub=DecoderStub(self._channel), table=self._table, keys=keys)

    async def kill(self) -> None:
        """End it as a crash would, also where it is stopped."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def freeze(self) -> None:
        """It does nothing any more, while its connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _spawn(self) -> None:
        named = zip(("--decode-port", "--control-port", "--metrics-port"), map(str, self._ports), strict=True)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._program, "decode", *self._flags, *chain.from_iterable(named)],
                env={**os.environ, **self._environment, "ANCHORLEG_SECRET": self._secret},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None, "the daemon has not been started"
        return self._process.pid

    async def ended(self, within_s: float) -> int:
        """Its exit status, when it ends by itself."""
        assert self._process is not None, "the daemon has not been started"
        await until(lambda: not self.runs, f"the daemon ends (see {self.log})", within_s)
        return self._process.wait()

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def free(self) -> bool:
        """Whether every slot is free; False where it does not answer."""
        states = await self._slots()
        return bool(states) and set(states) == {"free"}

    async def _slots(self) -> list[str]:
        """The states that slots are in."""
        try:
            async with httpx.AsyncClient(timeout=2.0) as client:
                text = (await client.get(f"http://127.0.0.1:{self._ports[2]}/metrics")).text
        except httpx.TransportError:
            return []
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return [sample.labels["state"] for sample in samples if sample.name == "anchorleg_slots" and sample.value]


@asynccontextmanager
async def apart(model_dir: Path, valkey: ValkeyProcess, secret: str, log: Path, **settings: Any) -> AsyncIterator[Apart]:
    """A running daemon of its own lease table."""
    async with LeaseTable(valkey.url, timeout_s=20) as table:
        daemon = Apart(model_dir, table, valkey.url, secret, log, **settings)
        try:
            await daemon.start()
            yield daemon
        finally:
            await daemon.kill()
