"""Shows how the stack comes up: a live table on a terminal, one line for each change elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from cli.supervise import Progress

COLOURS = {
    "waiting": "dim",
    "starting": "yellow",
    "ready": "green",
    "stopping": "yellow",
    "stopped": "dim",
    "failed": "red",
}


class StartDisplay:
    """Takes the progress of the processes (it is called with each) and shows it until its block ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._latest: dict[str, Progress] = {}
        self._begun = time.monotonic()
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=8)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def __call__(self, progress: Progress) -> None:
        """Take the news about one process."""
        before = self._latest.get(progress.name)
        changed = before is None or before.state != progress.state
        since = progress.since if changed or before is None else before.since
        self._latest[progress.name] = Progress(progress.name, progress.state, since, progress.detail)
        if changed and not self._console.is_terminal:
            detail = f" {progress.detail}" if progress.state == "waiting" else ""
            took = f"{progress.since - self._begun:6.1f} s"
            self._console.print(f"{took}  {progress.name:<10} {progress.state}{detail}", highlight=False)

    def _table(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for name, progress in self._latest.items():
            settled = progress.state in ("ready", "stopped", "failed")
            elapsed = (progress.since if settled else now) - self._begun
            colour = COLOURS[progress.state]
            state = f"[{colour}]{progress.state}[/{colour}]"
            table.add_row(name, state, f"{elapsed:.1f} s", "" if settled else f"[dim]{progress.detail}[/dim]")
        return table
