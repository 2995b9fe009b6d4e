"""Which cores this process may use, one entry for a physical core."""

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def physical_cores() -> list[int]:
    """Return the first logical CPU of each physical core in the process's affinity mask, in rising order."""
    chosen: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            core = (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        except OSError:  # a sandbox without /sys: every CPU counts as a core
            core = str(cpu)
        chosen.setdefault(core, cpu)
    return list(chosen.values())


def usable_cores() -> int:
    """Return how many physical cores the process may keep busy: those of its mask, or fewer where a cgroup's quota says so.

    Threads that wait for one another would be throttled together beyond the quota.
    """
    cores = len(physical_cores())
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no quota ("max"), or no cgroup v2
        return cores
