"""Requests that a lane decides on, and a look at what it holds afterwards."""

from typing import Any

from gateway.lane import Plain, Prefill, Refusal
from gateway.slo import SloClass, Wish
from tests.kit.legs import Step, reserved
from tests.kit.rig import Rig
from tests.kit.valkey import eventually

ALLOW, DENY = Wish(SloClass.LATENCY, fallback=True), Wish(SloClass.LATENCY, fallback=False)
WILLING: tuple[Step, ...] = (reserved(), "hang")


async def decide(made: Rig, wish: Wish = ALLOW, **fields: Any) -> Plain | Refusal | Prefill:
    return await made.decide(wish, **fields)


async def all_free(made: Rig, slots: int = 1, within_s: float = 1) -> None:
    async def free() -> bool:
        return await made.free_slots() == slots

    await eventually(free, within_s=within_s)
