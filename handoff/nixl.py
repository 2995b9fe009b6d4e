"""NIXL: one-sided writes by UCX, over whatever reaches the peer."""

import ctypes
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from handoff.transport import Peer, Piece, Progress, Region, Transfer, TransportError

logger = logging.getLogger(__name__)

_HOT_PERIOD_S = 0.0002
_HOT_S = 1.0  # after a nudge
_IDLE_PERIOD_S = 0.05
_MOST_REGIONS = 256  # on GPUs, of one peer: each write looks through them


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer must know: NIXL's own word of this agent, and which of its memory lies on a GPU, which NIXL does not tell."""

    agent: bytes
    on_gpus: Annotated[tuple[Region, ...], msgspec.Meta(max_length=_MOST_REGIONS)]


class NixlTransport:
    """NIXL over UCX: RDMA, CUDA IPC, shared memory or TCP, whichever reaches the peer."""

    name = "nixl"

    def __init__(self, label: str, attend: Callable[[], bool] = lambda: False) -> None:
        """Start an agent; `label` appears in NIXL's own logs. Raises TransportError when NIXL is not installed.

        `attend` tells whether a peer may be writing here now. Some transports land nothing unless the target's process takes
        part, so a thread looks often while it does, and rarely otherwise. NIXL's own progress thread never sleeps: it takes a
        whole core from the moment it starts.
        """
        api = _nixl_api()
        config = api.nixl_agent_config(
            enable_prog_thread=False, backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self._agent: Any = api.nixl_agent(f"{label}-{uuid.uuid4().hex[:12]}", config)
        self._registered: dict[Region, Any] = {}
        self._on_gpus: dict[Peer, tuple[Region, ...]] = {}  # of peers
        self._gpus = _Contexts()
        self._attend = attend
        self._hot_until = 0.0
        self._closed = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._progress, args=(self._agent,), name="nixl-progress", daemon=True)
        self._thread.start()

    def register(self, regions: Sequence[Region]) -> None:
        """See Transport."""
        for region in regions:
            if region in self._registered:
                continue
            memory = [(region.address, region.length, region.device or 0, "")]
            self._gpus.enter(region.device)
            try:
                self._registered[region] = self._agent.register_memory(memory, _memory_kind(region))
            except Exception as error:
                raise TransportError(f"NIXL cannot register {region}: {error}") from error

    def unregister(self, regions: Sequence[Region]) -> None:
        """See Transport."""
        for region in regions:
            handle = self._registered.pop(region, None)
            if handle is not None:
                self._agent.deregister_memory(handle)

    def metadata(self) -> bytes:
        """See Transport."""
        self.nudge()
        on_gpus = tuple(region for region in list(self._registered) if region.device is not None)
        return msgspec.msgpack.encode(_Metadata(bytes(self._agent.get_agent_metadata()), on_gpus))

    def connect(self, metadata: bytes) -> Peer:
        """See Transport. The connection is made now: the first write would otherwise pay 50 ms for it."""
        self.nudge()
        try:
            told = msgspec.msgpack.decode(metadata, type=_Metadata)
            self._gpus.enter(self._gpus.last)
            name = self._agent.add_remote_agent(told.agent)
            self._agent.make_connection(name)
        except Exception as error:
            raise TransportError(f"NIXL cannot connect to the peer: {error}") from error
        peer = Peer(name.decode() if isinstance(name, bytes) else str(name))
        self._on_gpus[peer] = told.on_gpus
        return peer

    def disconnect(self, peer: Peer) -> None:
        """See Transport."""
        try:
            self._agent.remove_remote_agent(peer)
        except Exception as error:
            if "NOT_FOUND" not in str(error):
                raise TransportError(f"NIXL cannot forget {peer}: {error}") from error
        self._on_gpus.pop(peer, None)

    def nudge(self) -> None:
        """See Transport."""
        self._hot_until = time.monotonic() + _HOT_S
        self._woken.set()

    def write(self, peer: Peer, pieces: Sequence[Piece], source: Region) -> Transfer:
        """See Transport. All pieces go to one region of the peer's."""
        self._gpus.enter(source.device)
        try:
            target = self._target(peer, pieces[0].remote)
            local = [(piece.local, piece.length, source.device or 0) for piece in pieces]
            remote = [(piece.remote, piece.length, target.device or 0) for piece in pieces]
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(local, _memory_kind(source)),
                self._agent.get_xfer_descs(remote, _memory_kind(target)),
                peer,
            )
            transfer = _NixlTransfer(self._agent, handle, peer)
            if self._agent.transfer(handle) == "ERR":
                with suppress(TransportError):  # the refusal is what the caller must hear
                    transfer.close()
                raise TransportError(f"NIXL refused a write of {len(pieces)} pieces to {peer}")
        except TransportError:
            raise
        except Exception as error:
            raise TransportError(f"NIXL cannot write to {peer}: {error}") from error
        return transfer

    def close(self) -> None:
        """See Transport. The agent's connections end with the last transfer that refers to it."""
        self._closed = True
        self._woken.set()
        self._thread.join(timeout=5.0)
        if self._agent is not None:
            self.unregister(list(self._registered))
            self._agent = None

    def _target(self, peer: Peer, address: int) -> Region:
        """Return the peer's region on a GPU that holds `address`; what lies in none is in the host's memory."""
        for region in self._on_gpus.get(peer, ()):
            if region.address <= address < region.address + region.length:
                return region
        return Region(address, 0)

    def _progress(self, agent: Any) -> None:
        while not self._closed:
            try:
                self._gpus.enter(self._gpus.last)
                agent.get_new_notifs()  # what NIXL calls progress: nothing of ours is notified this way
            except Exception:
                logger.exception("NIXL's progress failed; landing goes on where it can")
                time.sleep(_IDLE_PERIOD_S)
            if self._attend() or time.monotonic() < self._hot_until:
                time.sleep(_HOT_PERIOD_S)
            else:
                self._woken.wait(_IDLE_PERIOD_S)
                self._woken.clear()


class _NixlTransfer:
    def __init__(self, agent: Any, handle: Any, peer: Peer) -> None:
        self._agent = agent
        self._handle = handle
        self._peer = peer

    def poll(self) -> Progress:
        try:
            state = self._agent.check_xfer_state(self._handle)
        except Exception as error:
            raise TransportError(f"a NIXL write to {self._peer} failed: {error}") from error
        if state == "DONE":
            return Progress.DONE
        if state == "PROC":
            return Progress.BUSY
        raise TransportError(f"a NIXL write to {self._peer} ended in state {state}")

    def close(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            try:
                self._agent.release_xfer_handle(handle)
            except Exception as error:
                raise TransportError(f"a NIXL write to {self._peer} cannot be withdrawn: {error}") from error


class _Contexts:
    """Which GPU's context is current in which of the threads that call NIXL: UCX moves a GPU's memory in no other threads.

    For processes that use one GPU, as a vLLM worker and a decode daemon do: a thread stays with the context it entered last.
    """

    def __init__(self) -> None:
        self.last: int | None = None  # GPU that some thread entered
        self._entered = threading.local()

    def enter(self, device: int | None) -> None:
        """Make the context that all of the process shares current in this thread; nothing to do for host memory (None)."""
        if device is None or getattr(self._entered, "device", None) == device:
            return
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportError(f"GPU {device} cannot be used: {error}") from error
        context = ctypes.c_void_p()
        result = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) or driver.cuCtxSetCurrent(context)
        if result:
            raise TransportError(f"the context of GPU {device} cannot be had (CUDA error {result})")
        self._entered.device = self.last = device


def _memory_kind(region: Region) -> str:
    return "DRAM" if region.device is None else "VRAM"


def _nixl_api() -> Any:
    """Import NIXL under whichever name its wheel installed."""
    import importlib

    for package in ("nixl", "nixl_cu13", "nixl_cu12"):
        try:
            return importlib.import_module(f"{package}._api")
        except ModuleNotFoundError:
            continue
    raise TransportError("NIXL is not installed: pip install nixl-cu12 (or nixl-cu13)")
