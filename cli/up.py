"""`anchorleg up`: the stack in the foreground, until Ctrl-C or until one of its processes ends."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Never

from rich.console import Console

from cli.display import StartDisplay
from cli.settings import LocalSettings
from cli.stack import Stack
from cli.supervise import StackError
from process.signals import StopSignal

EXIT_STOPPED = 0
EXIT_DIED = 1


def run(settings: LocalSettings) -> int:
    """Keep the stack up; returns the exit status: 0 after a stop signal, 1 when a process failed.

    Raises:
        ProcessError: it cannot start, because a program, the model or a port is missing.
    """
    console = Console(stderr=True)
    return asyncio.run(until_stopped(_keep_up(settings, console), console))


async def until_stopped(work: Coroutine[Any, Any, Never], console: Console) -> int:
    """Let `work` run until a stop signal, which cancels it, or until it fails because a process did."""
    async with StopSignal() as stop:
        asked = asyncio.create_task(stop.wait())
        running = asyncio.create_task(work)
        await asyncio.wait({asked, running}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            running.cancel()
        try:
            await running
        except asyncio.CancelledError:
            return EXIT_STOPPED
        except StackError as error:
            console.print(f"anchorleg: {error}", markup=False, highlight=False, soft_wrap=True)
            return EXIT_DIED
        finally:
            asked.cancel()


async def _keep_up(settings: LocalSettings, console: Console) -> Never:
    with StartDisplay(console) as display:
        async with Stack(settings, report=display) as stack:
            _say_where(stack, console)
            raise await stack.first_death()


def _say_where(stack: Stack, console: Console) -> None:
    lines = [
        f"Ready. base_url={stack.base_url}  (the lane: add the header x-slo-class: latency)",
        f"Envoy's admin interface: http://127.0.0.1:{stack.ports.admin}  logs: {stack.logs['envoy'].parent}",
        *(f"metrics of {service.name}: {', '.join(service.metrics)}" for service in stack.services if service.metrics),
        "Ctrl-C stops everything.",
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
