"""The façade vLLM loads: every call goes to the scheduler side or the worker side, whichever this process holds."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from connector.announcer import Announcer
from connector.metadata import HandoffMetadata
from connector.scheduler import SchedulerSide
from connector.serving import describe_serving
from connector.settings import ConnectorSettings
from connector.worker import WorkerSide
from handoff.claim import ClaimKeys

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class AnchorlegConnector(KVConnectorBase_V1, SupportsHMA):
    """A pure producer: it loads nothing, matches nothing, and does nothing for a request without a valid claim."""

    # vLLM looks for exactly these parameter names.
    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_role != "kv_producer":
            raise ValueError(
                f"AnchorlegConnector is a producer only: set kv_role to kv_producer, not {transfer and transfer.kv_role}"
            )
        settings = ConnectorSettings.load(**transfer.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._announcer: Announcer | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._announcer = Announcer()
            keys = ClaimKeys(settings.signing_keys)
            block_tokens = vllm_config.cache_config.block_size
            self._scheduler = SchedulerSide(keys, block_tokens, self._announcer, describe_serving(vllm_config))
        else:
            self._worker = WorkerSide(vllm_config, settings)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Within a full CUDA graph no layer would be saved by itself."""
        return ConnectorSettings.load(**extra_config).pipeline_layers

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Sleep takes back the memory that is registered with the transport; from 0.33 on vLLM refuses the two together."""
        return False

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe and register the caches."""
        self._worker_side().register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start of a step: landing regions are asked for while the forward runs."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, HandoffMetadata)
        self._worker_side().begin_step(connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Wait for writes that read blocks about to be overwritten."""
        assert isinstance(kv_connector_metadata, HandoffMetadata)
        self._worker_side().fence(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """With pipeline_layers, the last chunk's blocks of this layer are sent at once; else all layers after the step."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, HandoffMetadata)
        self._worker_side().save_layer(metadata, layer_name)

    def wait_for_save(self) -> None:
        """End of a step: hand its blocks to the sender; nothing is waited for."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, HandoffMetadata)
        self._worker_side().end_step(metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose blocks may be freed."""
        return self._worker_side().take_finished(finished_req_ids) or None, None

    def shutdown(self) -> None:
        """Release sockets, thread and transport."""
        if self._worker is not None:
            self._worker.close()
        if self._announcer is not None:
            self._announcer.close()

    # Scheduler side.

    def on_new_request(self, request: "Request") -> None:
        """Look at the claim as early as possible: the daemon's socket connects meanwhile."""
        self._scheduler_side().consider(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """A producer has nothing to load."""
        self._scheduler_side().consider(request)
        return 0, False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Blocks are taken from the scheduler's output instead, where they are final."""

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Return the worker's work for this step."""
        return self._scheduler_side().build(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Note which blocks were released."""
        self._scheduler_side().released(connector_output.finished_sending or set())

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Send what only the scheduler knows; hold the blocks while they are read."""
        return self._scheduler_side().finished(request)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished."""
        return self._scheduler_side().finished(request)

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping until held blocks are released."""
        return self._scheduler_side().pending()

    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None, "a worker-side call reached the scheduler's process"
        return self._worker

    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler-side call reached a worker's process"
        return self._scheduler
