"""What the processes of a soak share: their settings, and the journals that they leave behind."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from leases import LeaseTable

POOL, CARD = "soak", "card"
CAPACITIES = (1_000, 4_000)
TIMEOUT_S = 1.0  # of one call of the table


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process is started with."""

    name: str  # new at every start
    folder: str
    url: str
    seed: int
    count: int  # daemons of a daemon process, clients of a gateway
    ttl_ms: int
    landing_ms: int
    waiter_ttl_ms: int

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def table(self) -> LeaseTable:
        return LeaseTable(
            self.url,
            ttl_ms=self.ttl_ms,
            landing_ms=self.landing_ms,
            waiter_ttl_ms=self.waiter_ttl_ms,
            timeout_s=TIMEOUT_S,
            holder=self.name,
        )


class Journal:
    """One line for each event, written at once: a killed process has said everything up to its end."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = os.open(folder / f"{name}.journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, what: str, **facts: Any) -> None:
        line = json.dumps({"ns": time.monotonic_ns(), "what": what, **facts})
        os.write(self._file, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._file)


Event = dict[str, Any]
"""A journal's line; `by` is the process, `ns` this machine's time.monotonic_ns()."""


def read_journals(folder: Path, kind: str = "") -> list[Event]:
    """All events in order, or those of one kind of process."""
    events = []
    for path in folder.glob(f"{kind}*.journal"):
        lines = path.read_text().split("\n")[:-1]  # what follows the last newline was cut off by a kill
        events += [json.loads(line) | {"by": path.stem} for line in lines]
    return sorted(events, key=lambda event: event["ns"])
