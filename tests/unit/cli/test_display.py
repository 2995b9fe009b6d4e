import io
import time

from rich.console import Console

from cli.display import StartDisplay
from cli.supervise import Progress, State


def progress(name: str, state: State, detail: str = "") -> Progress:
    return Progress(name, state, time.monotonic(), detail)


def test_away_from_a_terminal_each_change_is_one_line() -> None:
    out = io.StringIO()
    with StartDisplay(Console(file=out)) as display:
        display(progress("envoy", "waiting", "for vllm"))
        display(progress("vllm", "starting", "refused"))
        display(progress("vllm", "starting", "refused again"))
        display(progress("vllm", "ready"))
    lines = [" ".join(line.split()[2:]) for line in out.getvalue().splitlines()]
    assert lines == ["envoy waiting for vllm", "vllm starting", "vllm ready"]


def test_on_a_terminal_the_last_picture_shows_every_process_and_what_it_lacks() -> None:
    out = io.StringIO()
    with StartDisplay(Console(file=out, force_terminal=True, width=100)) as display:
        display(progress("redis", "ready"))
        display(progress("vllm", "starting", "connection refused"))
    last = out.getvalue()
    assert all(word in last for word in ("redis", "ready", "vllm", "starting", "connection refused"))
