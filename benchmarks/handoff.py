"""What the handoff costs: on the wire, between token 1 and token 2, and in vLLM's prefill. All in one run, in turns.

The claims are signed here, as a gateway signs them; everything else is the lane's own: connector, daemon, transports.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from benchmarks import handoff_gap, handoff_prefill, handoff_stack, handoff_wire
from benchmarks.report import Measure
from cli.settings import LocalSettings
from handoff.transport import TransportError
from handoff.transports import TransportName, open_transport
from process.errors import ProcessError

Part = Literal["wire", "gap", "prefill"]
PARTS: tuple[Part, ...] = get_args(Part)


async def measure(
    settings: LocalSettings, *, transports: Sequence[TransportName] = (), parts: Sequence[Part] = PARTS, rounds: int = 15
) -> list[Measure]:
    """Take the measures of the parts named.

    Args:
        settings: of the stack that `gap` and `prefill` run on; `wire` needs neither model nor vLLM's server.
        transports: those to compare, of which the first carries `gap` and `prefill`; none: all that are installed.
        parts: `wire` (bytes per second), `gap` (token 1 to token 2), `prefill` (throughput and memory).
        rounds: of which each figure is the median; `prefill`, which needs the quicker ones, takes four times as many.

    Raises:
        ProcessError: something is missing, does not start, or does not do its part; the message says what and the way out.
        TransportError: a transport that was named is not installed, or failed.
    """
    transports = transports or installed()
    measures: list[Measure] = []
    if "wire" in parts:
        measures += await handoff_wire.measure(transports, rounds=rounds)
    if "gap" in parts or "prefill" in parts:
        async with handoff_stack.running(settings, transports[0]) as stack:
            if "gap" in parts:
                measures += await handoff_gap.measure(stack, transports[0], requests=rounds)
            if "prefill" in parts:
                measures += await handoff_prefill.measure(stack, transports[0], rounds=4 * rounds)
    return measures


def installed() -> tuple[TransportName, ...]:
    """Return the transports that this machine has; raises ProcessError when it has none."""
    names = []
    reasons = []
    for name in get_args(TransportName):
        try:
            open_transport(name, "bench-look").close()
        except TransportError as error:
            reasons.append(str(error))
        else:
            names.append(name)
    if not names:
        raise ProcessError(f"no transport is installed: {'; '.join(reasons)}")
    return tuple(names)
