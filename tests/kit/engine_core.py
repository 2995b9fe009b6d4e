"""vLLM's engine, a process beside its server's: while it stands still the server takes requests, and no step is made."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.kit.lane import until

LOG_REQUESTS = "--enable-log-requests"  # for `taken`


@contextmanager
def standing_still(server: int) -> Iterator[None]:
    """Stop the engine of the vLLM whose server is this process."""
    [engine] = [one for one in psutil.Process(server).children(recursive=True) if "EngineCore" in "".join(one.cmdline())]
    engine.suspend()
    try:
        yield
    finally:
        engine.resume()


def taken(log: Path) -> int:
    """How many requests the server has given to the engine, by its log."""
    return log.read_text().count("Added request")


async def takes(log: Path, requests: int) -> None:
    """Returns once the server has given the engine so many requests in all."""
    await until(lambda: taken(log) >= requests, f"vLLM has the requests (see {log})", 60)
