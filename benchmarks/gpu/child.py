"""A program that does what it is asked, one JSON line for each question and answer; what else it prints goes to a log."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from process.errors import ProcessError

_ANSWER = "ANSWER "
_FAREWELL_S = 10.0
_SHOWN = 3000  # characters of the log in an error


class Child:
    """Made by `child`."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="child", daemon=True)
        self._reader.start()

    def ask(self, what: str, *, within_s: float = 120.0, **values: Any) -> dict[str, Any]:
        """Return the answer; raises ProcessError with the log's end where there is none in time, or it is an error."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # that it is gone, the lack of an answer says
            self._process.stdin.write(json.dumps({"what": what} | values) + "\n")
            self._process.stdin.flush()
        return self.answer(what, within_s)

    def answer(self, what: str, within_s: float) -> dict[str, Any]:
        """Wait for the next answer; raises ProcessError as `ask` does."""
        try:
            answer = self._answers.get(timeout=within_s)
        except queue.Empty:
            raise ProcessError(f"no answer to {what!r} within {within_s:g} s: {self._last_words()}") from None
        if answer is None:
            raise ProcessError(f"the process ended before it answered {what!r}: {self._last_words()}")
        if "error" in answer:
            raise ProcessError(f"{what!r} failed: {answer['error']}: {self._last_words()}")
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("a") as log:
            for line in self._process.stdout:
                if line.startswith(_ANSWER):
                    self._answers.put(json.loads(line.removeprefix(_ANSWER)))
                else:
                    log.write(line)
                    log.flush()
        self._answers.put(None)

    def _last_words(self) -> str:
        return f"the end of {self._log} is\n{self._log.read_text(errors='replace')[-_SHOWN:]}"


@contextmanager
def child(module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[Child]:
    """Start `python -m module`; it and all that it started end with the block."""
    log.write_text("")
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | dict(environment) | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield Child(process, log)
    finally:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_FAREWELL_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_FAREWELL_S)


def obey(handlers: Mapping[str, Callable[..., Mapping[str, Any]]]) -> None:
    """In the child: say that it is ready, then answer until standard input ends. Each answer is a mapping of plain values."""
    tell({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("what")
        try:
            answer = dict(handlers[what](**command))
        except Exception as error:  # noqa: BLE001 - whatever it is, the one who asked hears it
            answer = {"error": f"{type(error).__name__}: {error}"}
        tell(answer)


def tell(answer: Mapping[str, Any]) -> None:
    """Print one answer, on a line of its own whatever else is being printed."""
    sys.stdout.write(f"\n{_ANSWER}{json.dumps(dict(answer))}\n")
    sys.stdout.flush()
