"""The gateway's settings: flags, then ANCHORLEG_GATEWAY_*, then the TOML file's [gateway] table."""

from typing import ClassVar

from pydantic import Field

from process.settings import ProcessSettings


class GatewaySettings(ProcessSettings):
    """Everything an ext_proc process can be told."""

    section: ClassVar[str] = "gateway"

    listen_host: str = Field("127.0.0.1", description="Address of the ext_proc service that Envoy calls.")
    listen_port: int = Field(50051, ge=0, le=65535, description="Port of the ext_proc service.")
    metrics_host: str = Field("127.0.0.1", description="Address of the Prometheus endpoint.")
    metrics_port: int = Field(9464, ge=0, le=65535, description="Port of the Prometheus endpoint.")
    upstream_url: str = Field("http://127.0.0.1:10001", description="Envoy's internal listener: the gateway's own way to vLLM.")

    lease_ms: int = Field(10_000, ge=100, description="How long a lease may go unused before the table takes it back.")
    leases_timeout_s: float = Field(0.5, gt=0, description="How long one call to the lease table may take.")
    reserve_timeout_s: float = Field(1.0, gt=0, description="How long a daemon may take to reserve a slot.")
    claim_lifetime_s: int = Field(300, ge=1, description="How long a signed claim is valid.")
    landing_timeout_s: float = Field(
        30.0, gt=0, description="From vLLM's answer to the daemon's word that the KV cache landed."
    )
    queue_timeout_s: float = Field(2.0, gt=0, description="How long token 2 may wait for the daemon's other request.")
    stall_timeout_s: float = Field(
        30.0, gt=0, description="How long a daemon may take for one token before another way is taken."
    )
    resume_timeout_s: float = Field(60.0, gt=0, description="How long vLLM may take for one token of a resumed answer.")
    tokenize_timeout_s: float = Field(4.0, gt=0, description="How long vLLM may take to count a prompt; below Envoy's limit.")
    generation_timeout_s: int = Field(3600, ge=1, description="How long a whole non-streaming answer may take.")
    longest_body_bytes: int = Field(
        8 << 20, ge=1 << 16, description="Longest request body that the lane looks into; a longer one goes to plain vLLM."
    )
    template_tokens: int = Field(512, ge=0, description="Most tokens that a chat template adds to a prompt's bytes.")
    drain_timeout_s: float = Field(60.0, ge=0, description="On SIGTERM: how long running streams may go on.")
