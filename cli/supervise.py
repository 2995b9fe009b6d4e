"""Starts processes, waits until each is ready, and ends all of them together.

It knows nothing about what the processes are. Nothing outlives the supervisor: each process is the head of a
process group, gets SIGTERM from the kernel when the supervisor dies, and a reaper (`cli.reaper`) ends what is
left of the groups. The kernel ties that signal to the thread that started the process, so run a supervisor in a
thread that lives as long as its processes should.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cli import reaper
from cli.ready import why_not_ready
from cli.services import Service
from process.errors import ProcessError

State = Literal["waiting", "starting", "ready", "stopping", "stopped", "failed"]
LOOK_EVERY_S = 0.1
TAIL_LINES = 15
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Progress:
    """What one process is doing since `since` (`time.monotonic` seconds), and what its start still lacks."""

    name: str
    state: State
    since: float
    detail: str = ""


class StackError(ProcessError):
    """A process did not start, or ended while it was needed."""


class Supervisor:
    """Runs `services`, each with a log in `logs`; `find` gives the words that start a command's first word."""

    def __init__(
        self,
        services: Sequence[Service],
        logs: Path,
        *,
        find: Callable[[str], tuple[str, ...]],
        environment: dict[str, str],
        start_timeout_s: float,
        stop_timeout_s: float,
        report: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._services = tuple(services)
        self._logs = logs
        self._find = find
        self._environment = environment
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._report = report
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._reaper: subprocess.Popen[str] | None = None

    def log(self, name: str) -> Path:
        """Where standard output and error of the process `name` go."""
        return self._logs / f"{name}.log"

    def pid(self, name: str) -> int:
        """The process id of `name`, which is the id of its process group too."""
        return self._running[name].pid

    async def start(self) -> None:
        """Start everything, each process as soon as what it needs is ready; returns when all are.

        Raises:
            ProcessError: a program is missing, a process ended or was not ready in time; nothing runs then.
        """
        try:
            self._start_reaper()
            await self._start_all({service.name: self._find(service.command[0]) for service in self._services})
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def first_death(self) -> StackError:
        """Wait until one of the processes ends, and return what there is to say about it."""
        waits = {asyncio.create_task(process.wait()): name for name, process in self._running.items()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        name = waits[done.pop()]
        self._tell(name, "failed")
        return self._died(name)

    async def stop(self) -> None:
        """End every process, the last one first: SIGTERM to its group, and SIGKILL when it takes too long."""
        for service in reversed(self._services):
            if service.name in self._running:
                await self._stop(service.name)
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            await asyncio.to_thread(self._reaper.wait)
            self._reaper = None

    async def _start_all(self, programs: dict[str, tuple[str, ...]]) -> None:
        for service in self._services:
            self._tell(service.name, "waiting", f"for {', '.join(service.after)}" if service.after else "")
        is_ready = {service.name: asyncio.Event() for service in self._services}
        try:
            async with asyncio.TaskGroup() as tasks:
                for service in self._services:
                    needs = [is_ready[name] for name in service.after]
                    tasks.create_task(self._start_one(service, programs[service.name], needs, is_ready[service.name]))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _start_one(
        self,
        service: Service,
        program: tuple[str, ...],
        needs: Iterable[asyncio.Event],
        is_ready: asyncio.Event,
    ) -> None:
        for need in needs:
            await need.wait()
        process = await self._spawn(service, (*program, *service.command[1:]))
        ended = asyncio.create_task(process.wait())
        deadline = time.monotonic() + self._start_timeout_s
        missing: str | None = "its first check"
        try:
            while missing := await _first_missing(service.ready):
                self._tell(service.name, "starting", missing)
                await asyncio.wait({ended}, timeout=LOOK_EVERY_S)
                if ended.done():
                    raise self._died(service.name)
                if time.monotonic() > deadline:
                    raise StackError(
                        f"{service.name} was not ready after {self._start_timeout_s:g} s: {missing}\n{self._tail(service.name)}"
                    )
            if ended.done():  # what answered was not ours
                raise self._died(service.name)
        except StackError:
            self._tell(service.name, "failed")
            raise
        finally:
            ended.cancel()
        self._tell(service.name, "ready")
        is_ready.set()

    async def _spawn(self, service: Service, command: tuple[str, ...]) -> asyncio.subprocess.Process:
        self._logs.mkdir(parents=True, exist_ok=True)
        with self.log(service.name).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env={**self._environment, **service.environment},
                process_group=0,  # Ctrl-C in a terminal reaches the supervisor alone
                preexec_fn=_end_with(os.getpid()),
            )
        self._running[service.name] = process
        self._watch("+", process.pid)
        self._tell(service.name, "starting")
        return process

    async def _stop(self, name: str) -> None:
        process = self._running.pop(name)
        self._tell(name, "stopping")
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._stop_timeout_s):
                await process.wait()
        _signal_group(process.pid, signal.SIGKILL)  # what hangs, and what a process leaves behind
        await process.wait()
        self._watch("-", process.pid)
        self._tell(name, "stopped")

    def _start_reaper(self) -> None:
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, str(self._stop_timeout_s)],
            stdin=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def _watch(self, change: Literal["+", "-"], group: int) -> None:
        assert self._reaper is not None
        assert self._reaper.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # someone ended the reaper: ours is still the first hand
            self._reaper.stdin.write(f"{change}{group}\n")
            self._reaper.stdin.flush()

    def _tell(self, name: str, state: State, detail: str = "") -> None:
        self._report(Progress(name, state, time.monotonic(), detail))

    def _died(self, name: str) -> StackError:
        code = self._running[name].returncode
        how = f"was ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit status {code}"
        return StackError(f"{name} {how}\n{self._tail(name)}")

    def _tail(self, name: str) -> str:
        lines = self.log(name).read_text(errors="replace").splitlines()[-TAIL_LINES:]
        shown = "".join(f"  | {line}\n" for line in lines) or "  | (nothing was written)\n"
        return f"{shown}  the whole log: {self.log(name)}"


async def _first_missing(checks: Iterable[str]) -> str | None:
    for check in checks:
        if missing := await why_not_ready(check):
            return missing
    return None


def _end_with(parent: int) -> Callable[[], None]:
    """What a new process does before its program runs: ask the kernel for SIGTERM when `parent` dies."""

    def ask() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    return ask


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
