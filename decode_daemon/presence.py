"""What the daemon tells the lease table of itself in each heartbeat, and what it learns from the answer."""

import asyncio
from collections.abc import Sequence

from decode_daemon.pace import Pace
from decode_daemon.runner import EngineRunner
from decode_daemon.server import DecodeService
from decode_daemon.slots import LandingSlot
from leases import NodeStatus, SlotState, SlotView


class Presence:
    """The daemon's state as the table sees it.

    `alone` is set once a heartbeat has told the table of the drain and the answer named no lease that has yet to be used: from
    then on nobody new turns up.
    """

    def __init__(self, slots: Sequence[LandingSlot], runner: EngineRunner, pace: Pace, service: DecodeService) -> None:
        self._slots = slots
        self._runner = runner
        self._pace = pace
        self._service = service
        self._told_draining = False
        self.alone = asyncio.Event()

    def status(self) -> NodeStatus:
        """Return what is true of the daemon now.

        `busy_ms` is what the engine still has to decode, at the most and at its recent pace, for all requests that hold a slot:
        those that are landing or wait for their turn included.
        """
        return NodeStatus(
            idle=self._runner.idle and all(slot.epoch_in_use is None for slot in self._slots),
            busy_ms=self._pace.time_for_ms(sum(slot.owed for slot in self._slots)),
            draining=self._service.draining,
            served=self._service.served,
        )

    def look(self) -> tuple[NodeStatus, list[SlotView]]:
        """Return the next heartbeat's content."""
        self._told_draining = self._service.draining
        return self.status(), [SlotView(slot.index, slot.floor, slot.epoch_in_use, slot.state) for slot in self._slots]

    def hear(self, states: Sequence[SlotState]) -> None:
        """Take in the answer to the heartbeat that was looked up last."""
        for state in states:
            self._slots[state.slot].raise_floor(state.epoch - 1 if state.leased else state.epoch)
        # A slot's floor is at its lease's epoch from the reservation on.
        if self._told_draining and not any(state.leased and state.epoch > self._slots[state.slot].floor for state in states):
            self.alone.set()
