"""Waits for what a GPU that hangs never computes: bounded, no later than an endless wait would end, and cheap where it is long.

`cudaEventSynchronize` has no bound. Asking again and again in Python would keep the daemon's other thread, which publishes the
tokens, from its turns: it gets one only every 5 ms. So the asker pauses, but for no longer than is good for a step.
"""

import ctypes
import threading
import time
from collections.abc import Callable

import torch

from decode_daemon.engine.cuda.graphs import Computed, Event
from decode_daemon.engine.cuda.group import PATIENCE_S
from decode_daemon.engine.protocol import EngineLostError

GLANCE_S = 0.001  # between two looks at the other ranks
_SHORTEST_S, _LONGEST_S = 5e-6, 1e-3  # pauses
_SHARE = 1e-3  # of the time waited so far that a pause may take
_PR_SET_TIMERSLACK, _SLACK_NS = 29, 1_000  # prctl(2): Linux ends a thread's pauses up to 50 us late, unless it is told


class _Pauses(threading.local):
    """Of the calling thread; made anew in each."""

    def __init__(self) -> None:
        # Where it is refused, pauses are a little longer.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)

    def pause(self, waited: float) -> None:
        """Pause for a part of `waited`, the seconds waited so far."""
        time.sleep(min(max(_SHORTEST_S, waited * _SHARE), _LONGEST_S))


_pauses = _Pauses()


def computed(event: Event, seconds: float = PATIENCE_S, look: Callable[[], None] | None = None) -> bool:
    """Wait until all before `event` has been computed; False when it is not after `seconds`.

    `look` is called about once a millisecond, and may raise what ends the wait.
    """
    if event.query():
        return True
    began = looked = time.monotonic()
    while not event.query():
        now = time.monotonic()
        if now - began > seconds:
            return False
        if look is not None and now - looked >= GLANCE_S:
            look()
            looked = now
        _pauses.pause(now - began)
    return True


def wait(event: Event) -> None:
    """Wait until all before `event` has been computed. Raises EngineLostError when that takes longer than any step."""
    if not computed(event, PATIENCE_S):
        raise EngineLostError(
            f"the GPU has not computed a step within {PATIENCE_S:.0f} s: it hangs. Restart the daemon; if the GPU hangs again, "
            "the kernel's log (dmesg, NVRM: Xid) says why"
        )


def recorded(device: torch.device) -> Event:
    """Return an event after all that is queued on the current stream of `device`."""
    if device.type == "cpu":
        return Computed()
    event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
