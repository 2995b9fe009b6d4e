"""`python -m tests.soak`: the lease table under a minute of kills, freezes and a restart, counted."""

import argparse
import asyncio
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.soak.conductor import soak


async def _run(seconds: float, seed: int, ttl_ms: int) -> int:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:
        verdict = await soak(seconds, Path(folder), seed=seed, ttl_ms=ttl_ms)
    table = Table("figure", "value", title=f"{seconds:g} s, TTL {ttl_ms / 1_000:g} s, seed {seed}")
    for name, value in verdict.figures.items():
        table.add_row(name, value)
    console = Console(width=100)
    console.print(table)
    for violation in verdict.violations:
        console.print(f"VIOLATION: {violation}", markup=False)
    return 1 if verdict.violations else 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long there is trouble (60)")
    parser.add_argument("--ttl-ms", type=int, default=3_000, help="how long a heartbeat counts (3000)")
    parser.add_argument("--seed", type=int, default=1, help="of what is killed when; processes run as they may")
    arguments = parser.parse_args()
    sys.exit(asyncio.run(_run(arguments.seconds, arguments.seed, arguments.ttl_ms)))


if __name__ == "__main__":
    main()
