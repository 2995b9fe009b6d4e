"""How long the stages of one request took."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stages:
    """Seconds of a request's stages, in the order they happened."""

    began: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def mark(self, stage: str) -> None:
        """End a stage that began where the last one ended."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def header(self) -> str:
        """Return a server-timing value, in milliseconds."""
        return ", ".join(f"{stage};dur={seconds * 1000:.1f}" for stage, seconds in self.seconds.items())
