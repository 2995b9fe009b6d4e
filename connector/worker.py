"""The worker side: registers vLLM's KV cache, and passes each step's work to the sender thread."""

import logging
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram

from connector.metadata import HandoffMetadata
from connector.probe import backend_update, probe_block
from connector.sender import CacheMemory, Counters, Sender, SenderLimits, device_ready
from connector.settings import ConnectorSettings
from handoff.identity import model_digest
from handoff.layout import KVLayout, LayoutError
from handoff.messages import PROTOCOL_VERSION, Hello, ModelIdentity
from handoff.transport import NixlTransport, Region
from process.metrics import serve_metrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(f"vllm.anchorleg.{__name__}")  # below vLLM's own logger, so that its settings hold

_FENCE_S = 0.5  # vLLM's step waits for it, and with it every user


class WorkerSide:
    """Owns the sender, and which requests it has been told of."""

    def __init__(self, config: "VllmConfig", settings: ConnectorSettings) -> None:
        self._config = config
        self._settings = settings
        self._sender: Sender | None = None
        self._device = "cpu"
        self._finished: set[str] = set()  # vLLM has finished these; it waits to hear that their blocks are free
        self._opened: set[str] = set()
        self._stack = ExitStack()

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Describe the cache and start the sender.

        Raises LayoutError, TransportError, PortBusyError or OSError, which ends vLLM's start, when the cache cannot be handed
        over: a lane that silently never works is worse.
        """
        layout = self._describe(caches)
        memory = CacheMemory(tuple(_region(cache) for cache in caches.values()), layout.block.block_bytes)
        rank, ranks = self._config.parallel_config.rank, self._config.parallel_config.world_size
        model = self._model_identity()
        engine_id = uuid.uuid4().hex
        transport = NixlTransport(f"vllm-{rank}")

        hello = Hello(PROTOCOL_VERSION, engine_id, rank, ranks, model, layout, transport.name)
        self._sender = Sender(
            transport=transport,
            memory=memory,
            hello=hello,
            identity=f"{engine_id}-{rank}".encode(),
            limits=SenderLimits(self._settings.accept_timeout_s, self._settings.write_timeout_s),
            counters=self._counters(rank),
        )
        self._device = next(iter(caches.values())).device.type
        logger.info(
            "KV handoff ready: %d layers, block %s, layout %s",
            len(layout.layers),
            layout.block,
            layout.fingerprint,
        )

    def begin_step(self, metadata: HandoffMetadata) -> None:
        """Before the forward: ask daemons for landing regions, so that the answer is here when the first chunk is."""
        sender = self._require_sender()
        for request_id in metadata.withdrawn:
            sender.withdraw(request_id)
        for opening in metadata.openings:
            self._opened.add(opening.request_id)
            sender.open(opening.request_id, opening.claim, opening.prompt_tokens)

    def fence(self, metadata: HandoffMetadata) -> None:
        """Before blocks of a preempted request are overwritten: its writes must have ended."""
        preempted = set(metadata.preempted) & self._opened
        if not preempted:
            return
        sender = self._require_sender()
        for request_id in preempted:
            sender.withdraw(request_id)
        if not sender.wait_settled(preempted, _FENCE_S):
            logger.error("writes of %s did not end in time; their daemons will not use what arrives", sorted(preempted))

    def end_step(self, metadata: HandoffMetadata) -> None:
        """After the forward (and any draft forward): these blocks are final once the device has caught up."""
        if not metadata.chunks:
            return
        sender = self._require_sender()
        ready = device_ready(self._device)
        for chunk in metadata.chunks:
            sender.write(chunk.request_id, chunk.first_block, chunk.block_ids, last=chunk.last, ready=ready)

    def take_finished(self, finished: set[str]) -> set[str]:
        """Return, once each, the finished requests whose blocks nobody reads any more."""
        self._finished |= finished & self._opened
        if not self._finished:
            return set()
        sender = self._require_sender()
        done = sender.settled(self._finished)
        sender.forget(done)
        self._finished -= done
        self._opened -= done
        return done

    def close(self) -> None:
        """Stop the sender and the metrics endpoint."""
        if self._sender is not None:
            self._sender.close()
        self._stack.close()

    def _require_sender(self) -> Sender:
        assert self._sender is not None, "vLLM runs a step before it registered its KV caches"
        return self._sender

    def _describe(self, caches: Mapping[str, torch.Tensor]) -> KVLayout:
        if not caches:
            raise LayoutError("vLLM registered no KV cache")
        layers = self._config.compilation_config.static_forward_context
        model = self._config.model_config
        blocks = set()
        for name, cache in caches.items():
            block = probe_block(
                backend_update(layers[name]),
                cache,
                kv_heads=model.get_num_kv_heads(self._config.parallel_config),
                head_dim=model.get_head_size(),
                block_tokens=self._config.cache_config.block_size,
            )
            blocks.add(block)
        if len(blocks) != 1:
            raise LayoutError(f"the layers lie in {len(blocks)} different orders")
        return KVLayout(tuple(caches), blocks.pop())

    def _model_identity(self) -> ModelIdentity:
        model = self._config.model_config
        name = model.served_model_name
        digest = self._settings.model_identity or model_digest(Path(str(model.model)))
        return ModelIdentity(name if isinstance(name, str) else name[0], digest, model.max_model_len)

    def _counters(self, rank: int) -> Counters:
        registry = CollectorRegistry()
        sent_bytes = Counter("anchorleg_handoff_sent_bytes", "KV bytes written to daemons", registry=registry)
        seconds = Histogram("anchorleg_handoff_send_seconds", "First post to last completion", registry=registry)
        failed = Counter("anchorleg_handoff_failed", "Handoffs not completed", ["reason"], registry=registry)
        if self._settings.metrics_port is not None:
            port = self._settings.metrics_port + rank
            self._stack.enter_context(serve_metrics(self._settings.metrics_host, port, registry))

        def on_sent(size: int, duration: float) -> None:
            sent_bytes.inc(size)
            seconds.observe(duration)

        return Counters(on_sent, lambda reason: failed.labels(reason).inc())


def _region(cache: torch.Tensor) -> Region:
    device: Any = cache.device
    return Region(
        cache.data_ptr(),
        cache.numel() * cache.element_size(),
        device.index if device.type == "cuda" else None,
    )
