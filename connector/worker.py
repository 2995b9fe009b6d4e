"""The worker side: registers vLLM's KV cache, and passes each step's work to the sender thread."""

import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram

from connector.describe import describe
from connector.metadata import Chunk, HandoffMetadata
from connector.sender import CacheMemory, Counters, Sender, SenderLimits, device_ready
from connector.settings import ConnectorSettings
from connector.shards import require_whole_layers, shard_of
from handoff.identity import model_digest
from handoff.layout import LayoutError
from handoff.messages import PROTOCOL_VERSION, Hello, ModelIdentity
from handoff.transport import Region
from handoff.transports import open_transport
from process.metrics import serve_metrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(f"vllm.anchorleg.{__name__}")  # below vLLM's own logger, so that its settings hold

_FENCE_S = 0.5  # vLLM's step waits for it, and with it every user
# While blocks are held vLLM takes one empty step after another, as fast as it can. Each of them waits so long: the sender's
# thread, which shares the interpreter with them, would otherwise get the least of it. A new request may wait as long.
_REST_S = 0.002
# Each further one waits twice as long, up to this. Between two steps the processes of several ranks spin, and a daemon that
# shares their cores may get too little of them to answer: some were silent for as long as blocks were held for their answer.
_LONGEST_REST_S = 0.032


class WorkerSide:
    """Owns the sender of a rank that writes, and which requests it has been told of."""

    def __init__(self, config: "VllmConfig", settings: ConnectorSettings) -> None:
        self._config = config
        self._settings = settings
        self._sender: Sender | None = None
        self._writes = True  # until the caches show that another rank holds the same shard
        self._device = "cpu"
        self._layers: dict[str, int] = {}  # by vLLM's name: the place in execution order
        self._saved: set[int] = set()  # layers of which this step's last chunks have been handed to the sender
        self._finished: set[str] = set()  # vLLM has finished these; it waits to hear that their blocks are free
        self._opened: set[str] = set()
        self._resting = False  # in a step that computes nothing
        self._rest_s = _REST_S
        # Engines of a data-parallel group step together: the others may compute in a step that is empty here.
        self._may_rest = config.parallel_config.data_parallel_size == 1
        self._stack = ExitStack()

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Describe the cache and, on a rank that writes, start the sender.

        Raises LayoutError, TransportError, PortBusyError or OSError, which ends vLLM's start, when the cache cannot be handed
        over: a lane that silently never works is worse.
        """
        require_whole_layers(self._config)
        if self._settings.pipeline_layers and getattr(self._config.parallel_config, "use_ubatching", False):
            raise LayoutError("--enable-dbo saves a layer once for each half of a batch: pipeline_layers cannot go with it")
        layout = describe(self._config, caches)
        shard = shard_of(self._config, layout)
        rank = self._config.parallel_config.rank
        if not shard.writes:
            self._writes = False
            logger.info("KV handoff: another rank writes shard %d of %d; rank %d sends nothing", shard.index, shard.count, rank)
            return
        self._layers = {layer.name: index for index, layer in enumerate(layout.layers)}
        memory = CacheMemory(
            tuple(_region(caches[name]) for name in self._layers), tuple(map(layout.block_bytes, self._layers.values()))
        )
        name = self._settings.transport
        hello = Hello(PROTOCOL_VERSION, self._engine_id(), shard.index, shard.count, self._model_identity(), layout, name)
        counters = self._counters(rank)
        limits = SenderLimits(self._settings.accept_timeout_s, self._settings.write_timeout_s)
        identity = f"{uuid.uuid4().hex}-{rank}".encode()
        with unpinned():
            transport = open_transport(name, f"vllm-{rank}")
            try:
                self._sender = Sender(
                    transport=transport, memory=memory, hello=hello, identity=identity, limits=limits, counters=counters
                )
            except BaseException:
                transport.close()
                raise
        self._device = next(iter(caches.values())).device.type
        logger.info(
            "KV handoff ready: %d layers, shard %d of %d, layout %s",
            len(layout.layers),
            shard.index,
            shard.count,
            layout.fingerprint,
        )

    def begin_step(self, metadata: HandoffMetadata) -> None:
        """Before the forward: ask daemons for landing regions, so that the answer is here when the first chunk is."""
        # The scheduler's word: where vLLM calls start_load_kv after the forward, its arguments look the same in every step.
        self._resting = self._may_rest and not metadata.computes
        if metadata.computes:
            self._rest_s = _REST_S
        self._saved.clear()
        self._opened |= {opening.request_id for opening in metadata.openings}
        if not self._writes:
            return
        sender = self._require_sender()
        for request_id in metadata.withdrawn:
            sender.withdraw(request_id)
        for opening in metadata.openings:
            sender.open(opening.request_id, opening.claim, opening.prompt_tokens)

    def fence(self, metadata: HandoffMetadata) -> None:
        """Before blocks of a preempted request are overwritten: its writes must have ended."""
        preempted = set(metadata.preempted) & self._opened
        if not preempted or not self._writes:
            return
        sender = self._require_sender()
        for request_id in preempted:
            sender.withdraw(request_id)
        if not sender.wait_settled(preempted, _FENCE_S):
            logger.error("writes of %s did not end in time; their daemons will not use what arrives", sorted(preempted))

    def save_layer(self, metadata: HandoffMetadata, name: str) -> None:
        """Within the forward: this layer's part of the step is queued on the device, so its last chunks can follow it."""
        layer = self._layers.get(name)
        # A draft layer comes again for each further draft; the prompt's own slots are filled the first time.
        if layer is None or layer in self._saved or not self._settings.pipeline_layers or not self._writes:
            return
        last = [chunk for chunk in metadata.chunks if chunk.last]
        if last:
            self._saved.add(layer)
            self._write(last, layers=range(layer, layer + 1), end=False)

    def end_step(self, metadata: HandoffMetadata) -> None:
        """After the forward (and any draft forward): these blocks are final once the device has caught up."""
        if not metadata.chunks or not self._writes:
            return
        self._write([chunk for chunk in metadata.chunks if not chunk.last], layers=None, end=False)
        last = [chunk for chunk in metadata.chunks if chunk.last]
        if not self._saved:
            self._write(last, layers=None, end=True)
            return
        left = [index for index in self._layers.values() if index not in self._saved]
        for layer in left:  # those that the backend does not save by itself, as index caches
            self._write(last, layers=range(layer, layer + 1), end=False)
        self._write(last, layers=range(0), end=True)

    def take_finished(self, finished: set[str]) -> set[str]:
        """Return, once each, the finished requests whose blocks nobody reads any more."""
        self._finished |= finished & self._opened
        if not self._finished:
            return set()
        if self._writes:
            sender = self._require_sender()
            if self._resting:
                sender.wait_for_any(self._finished, self._rest_s)
                self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
            done = sender.settled(self._finished)
            sender.forget(done)
        else:  # nobody reads this rank's copy; vLLM waits for every rank's word
            done = set(self._finished)
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

    def _write(self, chunks: Sequence[Chunk], *, layers: range | None, end: bool) -> None:
        if not chunks:
            return
        sender, ready = self._require_sender(), device_ready(self._device)
        for chunk in chunks:
            sender.write(chunk.request_id, chunk.first_block, chunk.block_ids, last=end, ready=ready, layers=layers)

    def _engine_id(self) -> str:
        """The same in every rank of this vLLM."""
        transfer = self._config.kv_transfer_config
        assert transfer is not None, "vLLM made a connector without a --kv-transfer-config"
        return str(transfer.engine_id)

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


@contextmanager
def unpinned() -> Iterator[None]:
    """Threads that begin in the block may run on every core that the parent process may.

    On CPUs vLLM pins a worker to the cores it computes on, and the threads that it begins with it.
    """
    own = os.sched_getaffinity(0)
    with suppress(OSError):  # the parent is not ours to ask
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _region(cache: torch.Tensor) -> Region:
    device: Any = cache.device
    return Region(
        cache.data_ptr(),
        cache.numel() * cache.element_size(),
        device.index if device.type == "cuda" else None,
    )
