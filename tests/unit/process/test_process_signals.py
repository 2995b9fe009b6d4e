import asyncio
import os
import signal
import subprocess
import sys

import pytest

from process.signals import StopSignal

WAITS_THEN_CLEANS_UP_FOR_EVER = """
import asyncio, threading
from process.signals import StopSignal
async def main():
    async with StopSignal() as stop:
        print("waiting", flush=True)
        print((await stop.wait()).name, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_ends_the_wait_and_the_old_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    async with StopSignal() as stop:
        assert not stop.received
        os.kill(os.getpid(), number)
        assert await asyncio.wait_for(stop.wait(), 5) is number
        assert stop.received
    assert signal.getsignal(number) == before


def test_a_second_signal_ends_the_process_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS_THEN_CLEANS_UP_FOR_EVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "SIGTERM\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == -signal.SIGINT
