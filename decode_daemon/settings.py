"""The decode daemon's settings: flags, then ANCHORLEG_DAEMON_*, then the TOML file's [daemon] table."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from handoff.transports import TransportName
from leases.url import parse as parse_redis_url
from process.settings import ProcessSettings


class DaemonSettings(ProcessSettings):
    """Everything a daemon can be told."""

    section: ClassVar[str] = "daemon"

    model_dir: Path = Field(description="Hugging Face folder with config.json, tokenizer.json and safetensors.")
    served_model_name: str = Field(min_length=1, description="The name clients use; vLLM's --served-model-name.")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Of weights and KV cache; vLLM's --dtype.")
    accept_fp8_kv: bool = Field(
        False,
        description="Take vLLM's fp8 KV cache (--kv-cache-dtype fp8). It changes numerics: the engine goes on in its own dtype "
        "from rounded keys and values, so answers differ from plain vLLM's, which decodes in fp8.",
    )
    context_tokens: int = Field(4096, ge=16, description="Prompt and output of one request; vLLM's --max-model-len.")
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine; default: one per core.")
    step: Literal["auto", "cuda", "native", "torch"] = Field(
        "auto",
        description="What computes a step: kernels for CUDA on GPUs from Hopper on, native code where it can be built, PyTorch "
        "elsewhere; or only the one named.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="GPUs of this machine that compute each step together, the first ones that are visible. It must divide "
        "the model's heads, KV heads and inner size.",
    )
    weights: Literal["as-is", "fp8"] = Field(
        "as-is",
        description="How the CUDA step keeps the layers' matrices: as the model has them, or rounded to fp8 (e4m3, one scale a "
        "row) when they are loaded. fp8 halves their bytes and changes numerics: answers differ from plain vLLM's, which "
        "decodes with the model's own weights.",
    )
    pin_threads: bool = Field(True, description="Keep the native step's threads on cores of their own when they fill them all.")
    cache_dir: Path | None = Field(None, description="Where native code is built; default: $XDG_CACHE_HOME/anchorleg.")
    speculation: Literal["off", "ngram", "auto"] = Field(
        "auto",
        description="What drafts tokens that a step verifies beside its own, without changing the answer: nothing, the prompt "
        "and the answer so far, or these and a draft head, where there is one for the model.",
    )
    draft_head: Path | None = Field(
        None, description="A draft head's file, for speculation auto; default on CPUs: the engine's own for the model, if any."
    )
    slots: int = Field(2, ge=1, le=16, description="Landing slots: one more than one lets the next prefill overlap.")

    grammar_cache_mb: int = Field(256, ge=1, description="Memory for compiled grammars of structured output that are kept.")
    grammar_wait_s: float = Field(
        5.0,
        gt=0,
        description="How long an answer whose KV cache is there may wait for its grammar. Then the daemon gives it up, "
        "and the gateway has it served elsewhere where that is exact.",
    )

    transport: TransportName = Field("nixl", description="How KV arrives; the connectors' must be the same.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    advertise_host: str | None = Field(None, description="Address that gateways and vLLM reach this daemon at; default: host.")
    decode_port: int = Field(50061, ge=0, le=65535, description="gRPC port of the token stream.")
    control_port: int = Field(50062, ge=0, le=65535, description="ZeroMQ port for connectors.")
    metrics_host: str = Field("127.0.0.1", description="Address of the Prometheus endpoint.")
    metrics_port: int = Field(9465, ge=0, le=65535, description="Port of the Prometheus endpoint.")

    landing_timeout_s: float = Field(120.0, gt=0, description="From reserving a slot to the whole KV cache being there.")
    unused_lease_s: float = Field(3.0, ge=0.001, description="A lease that no gateway turned up for is taken back after this.")
    writer_grace_s: float = Field(5.0, gt=0, description="How long a cancelled writer may take to say that it stopped.")
    reader_grace_s: float = Field(30.0, gt=0, description="How long a gateway may take to read a token before it is dropped.")
    drain_timeout_s: float = Field(
        60.0, ge=0, description="On SIGTERM: how long running requests may go on before they are left to vLLM."
    )

    @field_validator("redis_url")
    @classmethod
    def _redis_can_be_found(cls, url: str) -> str:
        parse_redis_url(url)
        return url
