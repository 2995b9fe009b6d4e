"""Waits for a GPU: over at once where it has computed, in time where it has not, and bounded where it hangs."""

import time

import pytest
import torch

from decode_daemon.engine.cuda import waiting
from decode_daemon.engine.cuda.model import CudaModel
from decode_daemon.engine.cuda.waiting import computed, recorded, wait
from decode_daemon.engine.protocol import EngineLostError
from tests.unit.engine.test_engine_cuda_model import FakeStep, model  # noqa: F401 - `model` is a fixture

pytest.importorskip("triton")


class After:
    """An event that is over after so many seconds, and counts how often it is asked."""

    def __init__(self, seconds: float) -> None:
        self.end, self.asked = time.monotonic() + seconds, 0

    def record(self) -> None: ...

    def query(self) -> bool:
        self.asked += 1
        return time.monotonic() >= self.end


NEVER = float("inf")


def test_what_is_computed_is_not_waited_for() -> None:
    assert computed(recorded(torch.device("cpu")), seconds=0.0)
    event = After(0)
    wait(event)
    assert event.asked == 1


def test_a_step_is_waited_for_until_it_is_there() -> None:
    event = After(0.02)
    assert computed(event)
    assert time.monotonic() >= event.end


def test_the_longer_it_takes_the_more_rarely_it_is_looked_at() -> None:
    event = After(NEVER)
    assert not computed(event, seconds=0.5)
    # Pauses of 5 us at first and of a thousandth of what has passed from then on; without those it is half a million times.
    assert event.asked < 1000 * (1 + 5) * 2


def test_whoever_looks_meanwhile_may_end_it() -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise EngineLostError("rank 1 is lost")

    with pytest.raises(EngineLostError, match="rank 1 is lost"):
        computed(After(NEVER), look=look)


def test_a_gpu_that_hangs_loses_the_engine(
    monkeypatch: pytest.MonkeyPatch,
    model: tuple[CudaModel, FakeStep],  # noqa: F811
) -> None:
    cuda_model, _ = model
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.1)
    monkeypatch.setattr(cuda_model, "_events", [After(NEVER)] * 4)
    with pytest.raises(EngineLostError, match=r"has not computed a step within 0 s: it hangs\. Restart the daemon"):
        cuda_model.greedy(5, 30)
    monkeypatch.setattr("decode_daemon.engine.cuda.model.recorded", lambda _: After(NEVER))
    with pytest.raises(EngineLostError, match="it hangs"):
        cuda_model.bests([5, 6], 30)
