"""The daemon's Prometheus metrics."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from decode_daemon.slots import LandingSlot, SlotState
from leases import NodeStatus

_STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.012, 0.02, 0.03, 0.05, 0.08, 0.15, 0.3, 1.0)
_STAGE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class DaemonMetrics:
    """One registry per daemon, so that several can live in one process in tests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "anchorleg_decode_requests", "Decode streams by how they ended", ["outcome"], registry=self.registry
        )
        self.tokens = Counter("anchorleg_decode_tokens", "Tokens decoded", registry=self.registry)
        self.drafted = Counter(
            "anchorleg_decode_drafted_tokens", "Tokens that were drafted and verified", registry=self.registry
        )
        self.accepted = Counter(
            "anchorleg_decode_accepted_tokens", "Drafted tokens that the answer took", registry=self.registry
        )
        self.step_seconds = Histogram(
            "anchorleg_decode_step_seconds", "One engine step", buckets=_STEP_BUCKETS, registry=self.registry
        )
        self.convert_seconds = Histogram(
            "anchorleg_convert_seconds", "Landed blocks to the engine's cache", buckets=_STAGE_BUCKETS, registry=self.registry
        )
        self.landing_seconds = Histogram(
            "anchorleg_landing_seconds",
            "First accepted writer to a whole KV cache",
            buckets=_STAGE_BUCKETS,
            registry=self.registry,
        )
        self.grammar_seconds = Histogram(
            "anchorleg_grammar_compile_seconds",
            "Compiling a request's grammar, or finding it compiled",
            buckets=_STAGE_BUCKETS,
            registry=self.registry,
        )
        self.handoff_bytes = Counter("anchorleg_handoff_received_bytes", "KV bytes landed", registry=self.registry)
        self._slots = Gauge("anchorleg_slots", "Landing slots by state", ["state"], registry=self.registry)
        self._busy_seconds = Gauge(
            "anchorleg_daemon_busy_seconds", "How long what holds a slot may still decode", registry=self.registry
        )
        self._draining = Gauge("anchorleg_daemon_draining", "1 while the daemon finishes and stops", registry=self.registry)

    def watch(self, slots: list[LandingSlot]) -> None:
        """Count slots by state whenever metrics are read."""
        for state in SlotState:
            self._slots.labels(state).set_function(lambda state=state: sum(slot.state is state for slot in slots))  # type: ignore[misc]

    def report(self, status: Callable[[], NodeStatus]) -> None:
        """Say what the lease table is told of the daemon, whenever metrics are read."""
        self._busy_seconds.set_function(lambda: status().busy_ms / 1000)
        self._draining.set_function(lambda: float(status().draining))
