"""Server-sent events: written as vLLM does, and read out of bytes that may be cut anywhere.

Inside a line, inside a character, between the two line ends.
"""

EVENT_STREAM = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"

_MAX_EVENT_BYTES = 16 << 20


def event(data: bytes) -> bytes:
    """Return an event of one line of data."""
    return b"data: " + data + b"\n\n"


class EventReader:
    """Collects the data of events. Line ends are LF and CRLF only: U+2028 and its like are text inside JSON."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of every event that the chunk completes; comments and other fields are none.

        Raises ValueError when an event grows beyond 16 MiB.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = [data for line in lines if (data := self._line(line.removesuffix(b"\r"))) is not None]
        if len(self._rest) + self._bytes > _MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {_MAX_EVENT_BYTES} bytes")
        return events

    def _line(self, line: bytes) -> bytes | None:
        if line.startswith(b"data:"):
            data = line[5:].removeprefix(b" ")
            self._data.append(data)
            self._bytes += len(data)
        elif not line and self._data:
            whole, self._data, self._bytes = b"\n".join(self._data), [], 0
            return whole
        return None
