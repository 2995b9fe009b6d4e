import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest

from cli.ports import free_ports
from cli.programs import MissingProgramError, find_program
from cli.services import Service
from cli.supervise import Progress, StackError, Supervisor

LISTEN = "import socket,sys,time; s=socket.create_server(('127.0.0.1',int(sys.argv[1]))); print('up',flush=True); "

# It holds {life} open before it listens, and so does its child, which ignores SIGTERM as its parent does.
HAS_A_STUBBORN_CHILD = (
    """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.set_inheritable(os.open('{life}', os.O_WRONLY), True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
"""
    + LISTEN
    + "time.sleep(60)"
)


@pytest.fixture
def port() -> int:
    return next(free_ports())


def listener(name: str, port: int, then: str = "time.sleep(60)", after: tuple[str, ...] = ()) -> Service:
    return Service(name, ("python", "-c", LISTEN + then, str(port)), ready=(f"tcp://127.0.0.1:{port}",), after=after)


def supervisor(
    tmp_path: Path,
    *services: Service,
    start_timeout_s: float = 20.0,
    stop_timeout_s: float = 10.0,
    report: Callable[[Progress], None] = lambda _: None,
) -> Supervisor:
    return Supervisor(
        services,
        tmp_path / "logs",
        find=find_program,
        environment=dict(os.environ),
        start_timeout_s=start_timeout_s,
        stop_timeout_s=stop_timeout_s,
        report=report,
    )


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def life(tmp_path: Path) -> Path:
    """A FIFO that processes hold open as long as they live."""
    path = tmp_path / "life"
    os.mkfifo(path)
    return path


async def everyone_has_let_go(reader: int) -> None:
    os.set_blocking(reader, True)
    assert await asyncio.wait_for(asyncio.to_thread(os.read, reader, 1), 10) == b""


async def test_a_process_starts_when_those_it_needs_are_ready_and_stops_before_them(tmp_path: Path) -> None:
    first, second = islice(free_ports(), 2)
    seen: list[tuple[str, str]] = []
    stack = supervisor(
        tmp_path,
        listener("store", first),
        listener("gateway", second, after=("store",)),
        report=lambda p: seen.append((p.name, p.state)),
    )
    await stack.start()
    groups = [stack.pid("store"), stack.pid("gateway")]
    await stack.stop()
    assert seen.index(("store", "ready")) < seen.index(("gateway", "starting"))
    assert seen.index(("gateway", "stopped")) < seen.index(("store", "stopping"))
    assert not any(map(group_is_alive, groups))
    assert stack.log("store").read_text() == "up\n"


async def test_processes_that_need_nothing_start_at_the_same_time(tmp_path: Path) -> None:
    """Each is ready only once the other listens too."""
    ports = list(islice(free_ports(), 2))
    ready = tuple(f"tcp://127.0.0.1:{port}" for port in ports)
    services = [Service(f"p{port}", listener("", port).command, ready=ready) for port in ports]
    stack = supervisor(tmp_path, *services)
    await stack.start()
    await stack.stop()


async def test_the_death_of_one_names_it_with_its_status_and_last_words(tmp_path: Path, port: int) -> None:
    stack = supervisor(tmp_path, listener("vllm", port))
    await stack.start()
    try:
        os.kill(stack.pid("vllm"), signal.SIGKILL)
        told = str(await asyncio.wait_for(stack.first_death(), 10))
    finally:
        await stack.stop()
    assert "vllm was ended by SIGKILL" in told
    assert "| up" in told
    assert str(stack.log("vllm")) in told


async def test_a_process_that_ends_before_it_is_ready_fails_the_start_and_stops_the_others(tmp_path: Path, port: int) -> None:
    groups: list[int] = []

    def note_group(progress: Progress) -> None:
        if progress == Progress("store", "ready", progress.since):
            groups.append(stack.pid("store"))

    broken = Service(
        "vllm", ("python", "-c", "import sys; sys.exit('no such model')"), ready=("tcp://127.0.0.1:1",), after=("store",)
    )
    stack = supervisor(tmp_path, listener("store", port), broken, report=note_group)
    with pytest.raises(StackError, match=r"vllm ended with exit status 1\n  \| no such model\n") as refused:
        await stack.start()
    assert str(tmp_path / "logs" / "vllm.log") in str(refused.value)
    assert len(groups) == 1
    assert not group_is_alive(groups[0])


async def test_a_process_that_is_never_ready_is_named_with_what_it_lacks(tmp_path: Path, port: int) -> None:
    silent = Service("vllm", ("python", "-c", "import time; time.sleep(60)"), ready=(f"tcp://127.0.0.1:{port}",))
    stack = supervisor(tmp_path, silent, start_timeout_s=0.3)
    with pytest.raises(StackError, match=rf"vllm was not ready after 0\.3 s: tcp://127\.0\.0\.1:{port}: "):
        await stack.start()


async def test_a_missing_program_is_refused_by_name_with_the_way_out(tmp_path: Path) -> None:
    stack = supervisor(tmp_path, Service("cache", ("no-such-program",)))
    with pytest.raises(MissingProgramError, match="no-such-program is not on this machine: put it on the PATH"):
        await stack.start()


async def test_a_process_that_ignores_sigterm_is_killed_after_the_bound(tmp_path: Path, port: int) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + LISTEN + "time.sleep(60)"
    service = Service("vllm", ("python", "-c", stubborn, str(port)), ready=(f"tcp://127.0.0.1:{port}",))
    stack = supervisor(tmp_path, service, stop_timeout_s=0.2)
    await stack.start()
    group = stack.pid("vllm")
    begun = time.monotonic()
    await stack.stop()
    assert 0.2 <= time.monotonic() - begun < 5
    assert not group_is_alive(group)


async def test_children_of_a_process_end_with_it(tmp_path: Path, port: int, life: Path) -> None:
    reader = os.open(life, os.O_RDONLY | os.O_NONBLOCK)
    code = HAS_A_STUBBORN_CHILD.format(life=life)
    service = Service("vllm", ("python", "-c", code, str(port)), ready=(f"tcp://127.0.0.1:{port}",))
    stack = supervisor(tmp_path, service, stop_timeout_s=0.2)
    await stack.start()
    await stack.stop()
    await everyone_has_let_go(reader)
    os.close(reader)


async def test_a_start_that_is_cancelled_leaves_nothing_behind(tmp_path: Path, port: int) -> None:
    started = asyncio.Event()
    stack = supervisor(
        tmp_path,
        listener("store", port),
        Service("vllm", ("python", "-c", "import time; time.sleep(60)"), ready=("tcp://127.0.0.1:1",), after=("store",)),
        report=lambda p: started.set() if p.name == "vllm" and p.state == "starting" else None,
    )
    start = asyncio.create_task(stack.start())
    await asyncio.wait_for(started.wait(), 10)
    group = stack.pid("store")
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not group_is_alive(group)


SUPERVISE = """
import asyncio, os, sys
from pathlib import Path
from rich.console import Console
from cli.programs import find_program
from cli.services import Service
from cli.supervise import Supervisor
from cli.up import until_stopped

async def keep_up():
    code, port, folder = sys.argv[1:]
    service = Service("vllm", ("python", "-c", code, port), ready=(f"tcp://127.0.0.1:{port}",))
    stack = Supervisor([service], Path(folder), find=find_program, environment=dict(os.environ),
                       start_timeout_s=20, stop_timeout_s=0.3)
    await stack.start()
    try:
        print(stack.pid("vllm"), flush=True)
        raise await stack.first_death()
    finally:
        await stack.stop()

sys.exit(asyncio.run(until_stopped(keep_up(), Console(stderr=True))))
"""


@pytest.fixture
def supervising(tmp_path: Path, port: int, life: Path) -> Iterator[subprocess.Popen[str]]:
    code = HAS_A_STUBBORN_CHILD.format(life=life)
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, code, str(port), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        with suppress(ProcessLookupError):
            process.kill()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
async def test_however_the_supervisor_ends_nothing_stays_behind(
    supervising: subprocess.Popen[str], life: Path, number: signal.Signals, status: int
) -> None:
    reader = os.open(life, os.O_RDONLY | os.O_NONBLOCK)
    assert supervising.stdout is not None
    assert await asyncio.to_thread(supervising.stdout.readline)
    supervising.send_signal(number)
    assert await asyncio.to_thread(supervising.wait, 10) == status
    await everyone_has_let_go(reader)
    os.close(reader)


async def test_the_supervisor_exits_with_status_1_when_a_process_dies_and_says_which(
    supervising: subprocess.Popen[str], life: Path
) -> None:
    reader = os.open(life, os.O_RDONLY | os.O_NONBLOCK)
    assert supervising.stdout is not None
    os.kill(int(await asyncio.to_thread(supervising.stdout.readline)), signal.SIGKILL)
    _, told = await asyncio.to_thread(supervising.communicate, timeout=10)
    assert supervising.returncode == 1
    assert "vllm was ended by SIGKILL" in told
    await everyone_has_let_go(reader)
    os.close(reader)
