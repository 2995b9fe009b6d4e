"""A gateway process of a soak: clients that ask for slots, wait or do not, use them, give them back, or just leave."""

import asyncio
import json
import random
import signal
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

from leases import Denied, Grant, LeasesUnavailable, LeaseTable, SlotRequest, Tenant
from tests.soak.records import CARD, POOL, Journal, Setup

_TENANTS = (None, None, None, Tenant("acme", max_leases=12, max_waiting=12))
_TOKENS = (10, 10, 2_000)
_ANSWER_S = 1.0  # how long a daemon may take to say yes or no
_HOLD_S = (0.05, 1.0)
_REST_S = (0.01, 0.3)


class Client:
    """Asks again and again until the gateway stops."""

    def __init__(self, table: LeaseTable, journal: Journal, pick: random.Random, stop: asyncio.Event) -> None:
        self._table = table
        self._journal = journal
        self._pick = pick
        self._stop = stop

    async def run(self) -> None:
        avoid: tuple[str, ...] = ()
        while not self._stop.is_set():
            request = SlotRequest(
                pool=POOL,
                card=CARD,
                tokens=self._pick.choice(_TOKENS),
                lease_ms=5_000,
                wait_ms=self._pick.choice((0, 500, 3_000)),
                tenant=self._pick.choice(_TENANTS),
                avoid=avoid,
            )
            grant = await self._acquire(request)
            avoid = ()
            if grant is not None:
                avoid = await self._use(grant)
            elif request.wait_ms == 0 or self._pick.random() < 0.5:
                await asyncio.sleep(self._pick.uniform(*_REST_S))

    async def _acquire(self, request: SlotRequest) -> Grant | None:
        leaves_after_s = self._pick.uniform(0, 1) if self._pick.random() < 0.1 else None
        began = time.monotonic_ns()
        try:
            async with asyncio.timeout(leaves_after_s):
                outcome = await self._table.acquire(request)
        except TimeoutError:
            self._journal.write("leave", nonce=request.nonce)
            return None
        except LeasesUnavailable:
            self._journal.write("unavailable", nonce=request.nonce, began=began, wait_ms=request.wait_ms)
            return None
        if isinstance(outcome, Denied):
            self._journal.write("denied", reason=outcome.reason, nonce=request.nonce, began=began, wait_ms=request.wait_ms)
            return None
        facts = {"node": outcome.node_id, "slot": outcome.slot, "epoch": outcome.epoch, "nonce": outcome.nonce}
        self._journal.write("grant", began=began, wait_ms=request.wait_ms, **facts)
        return outcome

    async def _use(self, grant: Grant) -> tuple[str, ...]:
        """Returns the node to avoid next."""
        way = self._pick.random()
        if way < 0.03:
            self._journal.write("forget", nonce=grant.nonce)
            return ()
        if way < 0.08:
            await self._give_back(grant)
            await self._give_back(grant)
            return ()
        try:
            async with asyncio.timeout(_ANSWER_S + 2 * _HOLD_S[1]):
                answer = await self._decode(grant, leaves=way < 0.15)
        except (TimeoutError, OSError) as error:
            answer = type(error).__name__
        if answer == "reserved":
            return ()
        self._journal.write("unused", nonce=grant.nonce, reason=answer)
        await self._give_back(grant)
        return (grant.node_id,)

    async def _decode(self, grant: Grant, *, leaves: bool) -> str:
        reader, writer = await asyncio.open_unix_connection(grant.decode_endpoint)
        with closing(writer):
            hold_s = self._pick.uniform(*_HOLD_S)
            asked = {"node": grant.node_id, "slot": grant.slot, "epoch": grant.epoch, "hold_s": hold_s}
            writer.write(f"{json.dumps(asked)}\n".encode())
            async with asyncio.timeout(_ANSWER_S):
                answer = (await reader.readline()).decode().strip() or "gone"
            if answer == "reserved":
                if leaves:
                    await asyncio.sleep(hold_s / 2)
                else:
                    await reader.readline()
            return answer

    async def _give_back(self, grant: Grant) -> None:
        with suppress(LeasesUnavailable):
            await self._table.give_back(grant)


async def run(setup: Setup) -> None:
    """Work until SIGTERM, then finish."""
    stop = asyncio.Event()
    with closing(Journal(Path(setup.folder), setup.name)) as journal:
        async with setup.table() as table:

            def finish() -> None:
                stop.set()
                table.hurry()

            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, finish)
            journal.write("start")
            async with asyncio.TaskGroup() as clients:
                for number in range(setup.count):
                    clients.create_task(Client(table, journal, random.Random(setup.seed + number), stop).run())


if __name__ == "__main__":
    asyncio.run(run(Setup.load(sys.argv[1])))
