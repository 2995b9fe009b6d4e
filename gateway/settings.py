"""The gateway's settings: flags, then ANCHORLEG_GATEWAY_*, then the TOML file's [gateway] table."""

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from leases.url import parse as parse_redis_url
from process.settings import ProcessSettings


class GatewaySettings(ProcessSettings):
    """Everything an ext_proc process can be told."""

    section: ClassVar[str] = "gateway"

    listen_host: str = Field("127.0.0.1", description="Address of the ext_proc service that Envoy calls.")
    listen_port: int = Field(50051, ge=0, le=65535, description="Port of the ext_proc service.")
    metrics_host: str = Field("127.0.0.1", description="Address of the Prometheus endpoint.")
    metrics_port: int = Field(9464, ge=0, le=65535, description="Port of the Prometheus endpoint.")
    upstream_url: str = Field("http://127.0.0.1:10001", description="Envoy's internal listener: the gateway's own way to vLLM.")

    lease_ms: int = Field(
        3_000, ge=100, description="How long a lease may go unused before the table takes it back; above reserve_timeout_s."
    )
    leases_timeout_s: float = Field(0.5, gt=0, description="How long one call to the lease table may take.")
    reserve_timeout_s: float = Field(1.0, gt=0, description="How long a daemon may take to reserve a slot.")
    max_wait_ms: int = Field(
        10_000,
        ge=0,
        le=600_000,
        description="Longest wait for a slot, whatever a request asks for; keep it well below Envoy's max_message_timeout.",
    )
    default_wait_ms: int = Field(0, ge=0, description="How long a request without x-slo-max-wait-ms waits for a slot.")
    max_waiting: int = Field(256, ge=0, le=4_096, description="Most requests that may wait for a slot of one model.")
    tenant_header: str = Field(
        "",
        pattern=r"^[!#$%&'*+.^_`|~0-9a-z-]*$",
        description="Header that names a request's tenant, set by your own proxy over whatever a client sent. "
        "Requests without it share one account. Empty: no tenants.",
    )
    tenant_max_leases: int = Field(0, ge=0, description="Most slots of one model that a tenant may hold; 0: no limit.")
    tenant_max_waiting: int = Field(
        0, ge=0, description="Most requests of a tenant that may wait for a slot of one model; 0: no limit."
    )
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
    tools: Literal["plain", "derender"] = Field(
        "plain",
        description="How requests with tools are served: by plain vLLM, or in the lane with vLLM's own parsers through its "
        "derender endpoint, which needs --enable-scale-out.",
    )
    reasoning: Literal["none", "plain", "derender"] = Field(
        "none",
        description="What vLLM's --reasoning-parser means here: vLLM has none; chat completions go to plain vLLM; or they are "
        "served in the lane with vLLM's own parser, as tools are.",
    )
    force_include_usage: bool = Field(
        False, description="Whether vLLM runs with --enable-force-include-usage: the lane's streams then tell the usage, too."
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="Whether vLLM runs with --return-tokens-as-token-ids: the lane's logprobs then name tokens so, too."
    )
    longest_body_bytes: int = Field(
        8 << 20, ge=1 << 16, description="Longest request body that the lane looks into; a longer one goes to plain vLLM."
    )
    template_tokens: int = Field(512, ge=0, description="Most tokens that a chat template adds to a prompt's bytes.")
    drain_timeout_s: float = Field(60.0, ge=0, description="On SIGTERM: how long running streams may go on.")

    @field_validator("redis_url")
    @classmethod
    def _redis_can_be_found(cls, url: str) -> str:
        parse_redis_url(url)
        return url

    @field_validator("tenant_header", mode="before")
    @classmethod
    def _header_names_have_no_case(cls, name: object) -> object:
        return name.strip().lower() if isinstance(name, str) else name

    @field_validator("default_wait_ms")
    @classmethod
    def _default_lies_within_the_limit(cls, wait_ms: int, info: ValidationInfo) -> int:
        if wait_ms > (limit := info.data.get("max_wait_ms", wait_ms)):
            raise ValueError(f"max_wait_ms allows {limit} ms at most; raise it, or wait less by default")
        return wait_ms

    @field_validator("tenant_max_leases", "tenant_max_waiting")
    @classmethod
    def _limits_need_tenants(cls, most: int, info: ValidationInfo) -> int:
        if most and not info.data.get("tenant_header", "?"):
            raise ValueError("tenants have no limits while none are known; set tenant_header too")
        return most
