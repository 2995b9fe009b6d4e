"""Shows how far a conversion is: a bar on a terminal, a line for each file elsewhere."""

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class Shown:
    """Takes each file that is done (it is called with it), and shows it among all."""

    def __init__(self, console: Console, sizes: Mapping[str, int]) -> None:
        """`sizes`: bytes of every file there will be."""
        self._console = console
        self._sizes = sizes
        self._done = 0
        columns = (
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=sum(sizes.values()))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()
        if error is not None and self._done:
            self._print(f"{self._done} of {len(self._sizes)} files are complete; the same command goes on from there")

    def __call__(self, file: str, what: str) -> None:
        """Take that `file` is done; `what` says how: it was kept, or written."""
        self._done += 1
        self._bar.update(self._task, advance=self._sizes[file], description=f"{file} {what}")
        if not self._console.is_terminal:
            self._print(f"{self._done}/{len(self._sizes)}  {file}  {self._sizes[file] / 1e6:,.1f} MB  {what}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)
