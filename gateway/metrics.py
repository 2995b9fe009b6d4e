"""The gateway's Prometheus metrics. Every label has few values: reasons come from code, never from clients."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_STAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TOKEN_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.012, 0.02, 0.03, 0.05, 0.08, 0.15, 0.3, 1.0)

STAGES = ("decide", "slot", "reserve", "prefill", "handoff", "gap")


class GatewayMetrics:
    """One registry per gateway, so that several can live in one process in tests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "anchorleg_requests",
            "Requests that carried x-slo-class, by how they were served",
            ["slo_class", "lane", "outcome", "reason"],
            registry=self.registry,
        )
        self.calls = Counter("anchorleg_ext_proc_calls", "ext_proc calls from Envoy", registry=self.registry)
        self.stage_seconds = Histogram(
            "anchorleg_stage_seconds",
            "Stages of a latency request: decide, slot (lease, and the wait for it), reserve (daemon), prefill (vLLM), "
            "handoff (vLLM's answer to KV landed), gap (token 1 to token 2)",
            ["stage"],
            buckets=_STAGE_BUCKETS,
            registry=self.registry,
        )
        self.ttft_seconds = Histogram(
            "anchorleg_ttft_seconds", "Request body to token 1, latency lane", buckets=_STAGE_BUCKETS, registry=self.registry
        )
        self.inter_token_seconds = Histogram(
            "anchorleg_inter_token_seconds",
            "Between engine steps after token 2",
            buckets=_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.tokens = Counter("anchorleg_tokens", "Tokens sent to clients by the latency lane", registry=self.registry)
        self.resumed = Counter(
            "anchorleg_resumed",
            "Ways taken to go on with an answer, by what failed before: vllm (vLLM decodes on), daemon (another one does), "
            "retold (vLLM answers a greedy request again; what the client has is left out), whole (vLLM serves the request)",
            ["reason", "way"],
            registry=self.registry,
        )
        self.slot_wait_seconds = Histogram(
            "anchorleg_slot_wait_seconds",
            "From asking for a slot to the answer, of requests that may wait for one: granted, timeout (none free in time), "
            "left (the client went), denied (queue full, tenant limit, no daemon or table left, or this gateway stops)",
            ["ended"],
            buckets=_STAGE_BUCKETS,
            registry=self.registry,
        )
        self.pool_slots = Gauge("anchorleg_pool_slots", "Slots in the lease table", ["model", "state"], registry=self.registry)
        self.pool_waiting = Gauge(
            "anchorleg_pool_waiting", "Requests that wait for a slot, of all gateways", ["model"], registry=self.registry
        )
        self.pool_nodes = Gauge("anchorleg_pool_nodes", "Live decode daemons", ["model"], registry=self.registry)
        self.leases_up = Gauge("anchorleg_lease_table_up", "1 while the lease table answers", registry=self.registry)
        for stage in STAGES:
            self.stage_seconds.labels(stage)
