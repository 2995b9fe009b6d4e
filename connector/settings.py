"""The connector's settings: vLLM's kv_connector_extra_config first, then ANCHORLEG_CONNECTOR_*, then the TOML file."""

from typing import ClassVar

from pydantic import Field

from handoff.transports import TransportName
from process.settings import ProcessSettings


class ConnectorSettings(ProcessSettings):
    """Read in every vLLM process that holds a half of the connector."""

    section: ClassVar[str] = "connector"

    transport: TransportName = Field("nixl", description="How KV is written; the daemons' must be the same.")
    model_identity: str | None = Field(
        None,
        description="Digest of the weights, where vLLM's --model is not a local folder to compute it from.",
    )
    accept_timeout_s: float = Field(5.0, gt=0, description="How long a daemon may take to accept a writer.")
    write_timeout_s: float = Field(30.0, gt=0, description="How long one chunk's write may take.")
    pipeline_layers: bool = Field(
        False,
        description="Send the last chunk layer by layer while it is computed. vLLM then captures no full CUDA graphs.",
    )
    metrics_port: int | None = Field(
        None, description="Serve the sender's Prometheus metrics here (plus the rank); none by default."
    )
    metrics_host: str = Field("127.0.0.1", description="Address of that endpoint.")
