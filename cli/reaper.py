"""Ends process groups when the process that watches over them is gone, however it went.

`python -I -S reaper.py SECONDS` reads one line for each change from standard input: `+GROUP` to watch over a
process group, `-GROUP` to forget it. When the input ends, every group still known gets SIGTERM and, after
SECONDS, SIGKILL.
It stands alone and imports little, because it is started before everything else and must outlive it all.
"""

import os
import signal
import sys
import time

LOOK_EVERY_S = 0.05


def main(grace_s: float) -> None:
    """Follow standard input to its end, then end the groups that are left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change, group = line[0], int(line[1:])
        groups.add(group) if change == "+" else groups.discard(group)
    deadline = time.monotonic() + grace_s
    groups = {group for group in groups if _signal(group, signal.SIGTERM)}
    while groups and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
        groups = {group for group in groups if _signal(group, 0)}
    for group in groups:
        _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(float(sys.argv[1]))
