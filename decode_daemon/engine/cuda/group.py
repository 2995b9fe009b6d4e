"""The processes that compute one step together, one a GPU of one machine: how they meet, and what they pass each other.

NCCL between GPUs. Gloo where the device is the CPU, which is how this is tested. A process is in one group at a time.
"""

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from decode_daemon.engine.protocol import EngineError

# That a step is waited for, and a rank by another in it. It takes milliseconds; what else computes on the GPU may delay it, but
# not by as much.
PATIENCE_S = 60.0
_LEAVE_S = 10.0
_LOOPBACK = "127.0.0.1"
_SETTINGS = {
    # All ranks are on this machine, and nobody else needs to reach the sockets over which they meet.
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    # PyTorch's watchdog would end the daemon when a rank is lost; here that becomes an EngineError.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


# PyTorch 2.13 gave it another name, and warns of the old one.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Group:
    """This process among `ranks`, as the one of number `rank`."""

    rank: int
    ranks: int
    device: torch.device

    @classmethod
    def join(cls, rank: int, ranks: int, device: torch.device, store: TCPStore) -> "Group":
        """Meet the others; returns when all are there. Makes `device` the current one. Raises RuntimeError (torch's)."""
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=PATIENCE_S),
            device_id=device if cuda else None,
        )
        group = cls(rank, ranks, device)
        # A communicator that is first used while a graph is captured could not be set up.
        group.gather(torch.zeros(ranks, device=device), torch.zeros(1, device=device))
        if cuda:
            torch.cuda.synchronize(device)
        return group

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Queue: every rank's `part`, [n, ...], one after the other in `whole`, [ranks * n, ...], on every rank."""
        _gather(whole, part)

    def scatter(self, parts: Sequence[torch.Tensor]) -> None:
        """Queue, on rank 0: the first of `parts` to rank 1, and so on; each is contiguous."""
        _pass([dist.P2POp(dist.isend, part, peer) for peer, part in enumerate(parts, 1)])

    def collect(self, parts: Sequence[torch.Tensor]) -> None:
        """Queue, on rank 0: what ranks 1 and on `send`, into one of `parts` each; they are contiguous."""
        _pass([dist.P2POp(dist.irecv, part, peer) for peer, part in enumerate(parts, 1)])

    def receive(self, part: torch.Tensor) -> None:
        """Queue, elsewhere than on rank 0: what it scatters, into `part`."""
        _pass([dist.P2POp(dist.irecv, part, 0)])

    def send(self, part: torch.Tensor) -> None:
        """Queue, elsewhere than on rank 0: `part`, which it collects."""
        _pass([dist.P2POp(dist.isend, part, 0)])

    def leave(self) -> None:
        """End what is queued, whether the others are there or not, and leave. Graphs with collectives must be gone."""

        def end() -> None:
            with suppress(RuntimeError):  # of a rank that is lost
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                    dist.distributed_c10d._abort_process_group()
                else:
                    dist.destroy_process_group()

        # NCCL waits for what nobody may come to end: the time that may take is not the caller's.
        leaving = threading.Thread(target=end, name="leave group", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)


def meeting_place(ranks: int) -> TCPStore:
    """Open, on rank 0, the store where `ranks` processes meet; it listens on the loopback interface only.

    Raises EngineError when this process is in a group already: a group is the whole process's.
    """
    if dist.is_initialized():
        raise EngineError("this process is in a torch.distributed group already: it can have one tensor-parallel engine")
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    with socket.create_server((_LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            _LOOPBACK,
            port,
            ranks,
            is_master=True,
            timeout=timedelta(seconds=PATIENCE_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def meet(port: int, ranks: int) -> TCPStore:
    """Return the store that rank 0 opened on `port`. Raises RuntimeError (torch's) when it is not there."""
    return TCPStore(_LOOPBACK, port, ranks, is_master=False, timeout=timedelta(seconds=PATIENCE_S))


def _pass(ops: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(ops):
        work.wait()
