"""Settings of the stack that `anchorleg up` and `anchorleg demo` start on one machine."""

import secrets
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr

from process.settings import ProcessSettings

MODEL_NAME = "smollm2-135m-instruct"


def _port(default: int, description: str) -> int:
    port: int = Field(default, ge=1, le=65535, description=description)
    return port


class LocalSettings(ProcessSettings):
    """Section `local`: where the stack keeps its files, which ports it takes, and how vLLM is started."""

    section: ClassVar[str] = "local"

    secret: SecretStr = Field(
        default_factory=lambda: SecretStr(secrets.token_urlsafe(32)),
        description="Key that signs claims. By default a new random one for each run.",
    )
    state_dir: Path = Field(default=Path(".anchorleg"), description="Folder of models, logs and rendered configuration.")
    model_dir: Path | None = Field(
        default=None,
        description=f"Hugging Face folder of the model. By default models/{MODEL_NAME} in the state folder.",
    )
    served_model_name: str = Field(default="smollm2", description="The model's name in requests.")
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="Type of weights and KV cache.")
    context_tokens: int = Field(default=4096, ge=128, description="Longest prompt plus answer, in tokens.")
    daemons: int = Field(default=1, ge=1, le=16, description="How many decode daemons to start.")

    ports: Literal["fixed", "auto"] = Field(
        default="fixed", description="auto takes free ports instead of those below, so that several stacks can run."
    )
    public_port: int = _port(10000, "Where clients connect: Envoy's public listener.")
    internal_port: int = _port(10001, "Envoy's listener for the gateway's own calls to vLLM.")
    admin_port: int = _port(9901, "Envoy's admin interface and metrics.")
    redis_port: int = _port(6379, "Redis.")
    vllm_port: int = _port(8001, "vLLM.")
    connector_metrics_port: int = _port(9470, "The metrics of vLLM's connector.")
    extproc_port: int = _port(50051, "The gateway's gRPC server.")
    extproc_metrics_port: int = _port(9464, "The gateway's metrics.")
    decode_port: int = _port(50061, "The first decode daemon's gRPC server and, one above, its control socket.")
    decode_metrics_port: int = _port(9465, "The first decode daemon's metrics; further daemons take the next ones.")

    eager: bool = Field(default=False, description="Start vLLM with --enforce-eager: ready sooner, slower per token.")
    vllm_arg: list[str] = Field(default_factory=list, description="One more argument for vLLM; may be repeated.")
    vllm_cache_gib: int = Field(default=1, ge=1, description="Memory for vLLM's KV cache, in GiB.")
    buffer_limit_bytes: int = Field(default=64 << 20, ge=1 << 20, description="Longest request body that Envoy takes.")
    start_timeout_s: float = Field(default=600.0, gt=0, description="Longest time until a process is ready, in seconds.")
    stop_timeout_s: float = Field(default=15.0, gt=0, description="Longest time for a process to stop before it is killed.")

    @property
    def model(self) -> Path:
        """The model's folder, absolute."""
        return (self.model_dir or self.state_dir / "models" / MODEL_NAME).absolute()

    @property
    def logs(self) -> Path:
        """The folder of the logs, one file for each process, absolute."""
        return (self.state_dir / "logs").absolute()
