"""The soak in short, and that it would tell: a count of zero proves nothing unless the counter counts."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.soak.conductor import soak
from tests.soak.records import Event
from tests.soak.verdict import Ending, judge

SECOND = 1_000_000_000
TTL_MS = 3_000
WELL = Ending(slots=4, lost=(), free_after_s=1.0, whole_after_s=1.0)
LEASE = {"node": "daemons.1-0", "slot": 0, "epoch": 7}


async def test_no_slot_is_granted_twice_or_lost_under_kills_freezes_and_a_restart() -> None:
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:  # a socket's path is short
        verdict = await soak(8, Path(folder), seed=3, ttl_ms=1_500, slack_s=10)
    assert not verdict.violations, verdict


def events(*lines: tuple[float, str, str, dict[str, Any]]) -> list[Event]:
    """Of a sound soak, and these: (seconds, process, what, facts)."""
    sound: list[tuple[float, str, str, dict[str, Any]]] = [
        (1.0, "gateway.2", "grant", {**LEASE, "nonce": "a", "wait_ms": 500, "began": 0}),
        (1.1, "daemons.1", "reserve", LEASE),
        (2.0, "daemons.1", "finish", {**LEASE, "outcome": "done"}),
        (3.0, "conductor", "kill", {"name": "daemons.9"}),
    ]
    told = [{"ns": round(seconds * SECOND), "by": by, "what": what, **facts} for seconds, by, what, facts in (*sound, *lines)]
    return sorted(told, key=lambda event: event["ns"])


def test_a_sound_soak_has_no_violations() -> None:
    assert judge(events(), WELL, TTL_MS).violations == []


@pytest.mark.parametrize(
    ("lines", "violation"),
    [
        ([(1.5, "daemons.1", "reserve", LEASE | {"epoch": 8})], "while it was held"),
        ([(2.5, "daemons.1", "reserve", LEASE)], "for epoch 7 after epoch 7"),
        ([(2.5, "daemons.1", "reserve", LEASE | {"epoch": 6})], "for epoch 6 after epoch 7"),
        ([(1.2, "gateway.3", "grant", {**LEASE, "nonce": "b", "wait_ms": 0, "began": SECOND})], "was granted to a and to b"),
        (
            [(7.0, "gateway.3", "grant", {**LEASE, "node": "daemons.9-0", "nonce": "b", "wait_ms": 0, "began": 6.9 * SECOND})],
            "is of a daemon that was killed",
        ),
        ([(9.0, "gateway.3", "denied", {"reason": "busy", "wait_ms": 500, "began": 5 * SECOND})], "no answer within its bound"),
    ],
)
def test_every_violation_is_counted(lines: list[Any], violation: str) -> None:
    (found,) = judge(events(*lines), WELL, TTL_MS).violations
    assert violation in found


@pytest.mark.parametrize(
    ("ending", "violation"),
    [
        (Ending(4, ("daemons.1-0:0",), None, 1.0), "slot daemons.1-0:0 is lost"),
        (Ending(4, (), None, 1.0), "not all slots were free 4 s after"),
        (Ending(4, (), 1.0, None), "not within 2 s"),
        (Ending(4, (), 1.0, 2.5), "not within 2 s"),
    ],
)
def test_a_bad_ending_is_a_violation(ending: Ending, violation: str) -> None:
    assert any(violation in found for found in judge(events(), ending, TTL_MS).violations)


def test_a_stopped_process_may_be_late() -> None:
    late = (9.0, "gateway.3", "denied", {"reason": "busy", "wait_ms": 500, "began": 5 * SECOND})
    stopped = [(6.0, "conductor", "stop", {"name": "gateway.3"}), (8.0, "conductor", "cont", {"name": "gateway.3"})]
    assert judge(events(late, *stopped), WELL, TTL_MS).violations == []


def test_a_soak_in_which_nothing_happened_proves_nothing() -> None:
    assert judge([], WELL, TTL_MS).violations == ["nothing was proven: no reservation, no wait served, or nothing killed"]


def test_what_is_tied_ends_with_its_parent_even_when_stopped() -> None:
    tied = str(Path(__file__).with_name("tied.py"))
    reader, writer = os.pipe()  # at its end when the last process that holds the writing side is gone
    program = "import os, signal; os.write(1, b'x'); os.kill(os.getpid(), signal.SIGSTOP)"
    parent = f"import subprocess; subprocess.run([{sys.executable!r}, {tied!r}, {sys.executable!r}, '-c', {program!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=writer)
    os.close(writer)
    with open(reader, "rb", buffering=0) as ends:
        assert ends.read(1) == b"x"
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert ends.read(1) == b""
