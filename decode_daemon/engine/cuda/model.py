"""The CUDA step as a `StepModel`: graphs of whole steps, one for each width and bucket, and one greedy step queued ahead."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda.buckets import MAX_WIDTH, Bucket, bucket_of, padded, parts, power_of_two
from decode_daemon.engine.cuda.plan import Plan
from decode_daemon.engine.cuda.step import Step
from decode_daemon.engine.model import check_positions
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.weights import LayerWeights, Weights

_CAPABILITY = (9, 0)
_PLAN = Plan()
_RESULTS = 4  # results of greedy steps under way at once, at most two


def unsupported(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return what keeps the CUDA step from computing a model of this shape on `device`, None when nothing does."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (capability, _CAPABILITY))
        return f"{torch.cuda.get_device_name(device)} has compute capability {found}, the CUDA step needs {needed}"
    if dtype != torch.bfloat16:
        return f"the CUDA step computes in bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if config.head_dim < 32 or config.head_dim != power_of_two(config.head_dim):
        return f"head_dim is {config.head_dim}, the CUDA step needs a power of two from 32 on"
    return None


class CudaModel:
    """The weights and the KV cache of one sequence on a GPU, with steps in Triton; a `StepModel`.

    A row of logits is the same bit for bit whatever the width of its step. Everything is queued on the current stream, so what
    fills `cache` through PyTorch on that stream needs no further order. Not thread-safe.
    """

    widest = MAX_WIDTH

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        context_tokens: int,
        *,
        device: torch.device,
        widths: Iterable[int] = (1, 2, 4, 8),
        overlap: bool = True,
        plan: Plan = _PLAN,
    ) -> None:
        """Move `weights` to `device`, allocate the cache, compile, and capture a graph for each of `widths` and each bucket.

        `widths` must hold those (1, 2, 4, 8) that steps are padded to. `overlap` False launches each kernel after the one
        before it has ended. `plan` is for benchmarks. Raises EngineError when the GPU's memory is too small.
        """
        self.config = config
        self.context_tokens = context_tokens
        self.buckets = plan.attention.buckets(context_tokens, config.kv_heads, config.head_dim)
        splits = self.buckets[-1].splits
        try:
            self._step = Step(config, on_device(weights, device), context_tokens, splits, overlap=overlap, plan=plan)
        except torch.OutOfMemoryError as error:
            raise EngineError(f"weights and KV cache do not fit {torch.cuda.get_device_name(device)}: {error}") from error
        self._results, self._events = _results()
        self._slot = 0
        self._ahead: tuple[int, int, int] | None = None  # token, position and result slot of the step queued ahead
        self._following: tuple[int, int] | None = None  # token and position of the one-row step that needs no `feed`
        self._last = torch.zeros(1, dtype=torch.int64), 0  # ids and position of the last step that was not queued ahead
        self._graphs = {(width, bucket): self._captured(width, bucket) for width in {1, *widths} for bucket in self.buckets}

    @property
    def cache(self) -> torch.Tensor:
        """Return the KV cache; whoever asks may write to it, so a step that was queued ahead counts no longer."""
        self._ahead = None
        return self._step.cache

    def forward(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Store the KV of `ids` at `position` and on; return the logits after each; see `StepModel.forward`."""
        check_positions(position, ids.shape[0], self.context_tokens)
        self._check_ids(int(ids.min()), int(ids.max()))
        rows = [self._step.logits[:width].clone() for width in self._parts(ids, position)]
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def greedy(self, token: int, position: int) -> int | None:
        """Return the id of the largest logit after `token`; see `StepModel.greedy`.

        The step after it is queued before its result is read, from the id that the device found; when the next call asks for
        just that step, its result is on its way already. Otherwise that step was in vain: it wrote one position that no later
        step reads before it is written again.
        """
        slot = self._one_row(token, position)
        following = self._queue_greedy(position + 1) if position + 1 < self.context_tokens else None
        best = self._result(slot)
        self._ahead = None if following is None or best is None else (best, position + 1, following)
        return best

    def bests(self, ids: Sequence[int], position: int) -> list[int | None]:
        """Return the id of the largest logit after each of `ids`; see `StepModel.bests`. No step is queued ahead.

        Of one id this is `greedy`, with the result of the step that was queued ahead if it is the one.
        """
        if len(ids) == 1:
            best = self._result(self._one_row(ids[0], position))
            self._ahead, self._last = None, (torch.tensor(ids), position)
            self._following = None if best is None else (best, position + 1)
            return [best]
        check_positions(position, len(ids), self.context_tokens)
        self._check_ids(min(ids), max(ids))
        found = [best for width in self._parts(torch.tensor(ids), position) for best in self._step.best[:width].tolist()]
        return [best if best >= 0 else None for best in found]

    def under_way(self, token: int, position: int) -> bool:
        """Tell if the step of `token` at `position` was queued ahead."""
        return self._ahead is not None and self._ahead[:2] == (token, position)

    def hidden(self, rows: int) -> torch.Tensor:
        """Return the last step's rows before the final norm; see `StepModel.hidden`."""
        ids, position = self._last
        if position + ids.shape[0] <= bucket_of(position, self.buckets).tokens:
            return self._step._x[:rows].clone()
        # Of a step that was cut only the last part's rows are left. It happens once a bucket: the others are computed again.
        return torch.cat([self._step._x[:width].clone() for width in self._parts(ids, position)])[:rows]

    def feed(self, ids: torch.Tensor, position: int) -> None:
        """Tell the next step its `ids` (up to 8) and where the first stands."""
        self._following = None
        # From pageable memory: the driver has read it when the call returns, so no buffer of ours can change too early.
        self._step.ids[: ids.shape[0]].copy_(ids, non_blocking=True)
        self._step.state.copy_(torch.tensor((position, ids.shape[0]), dtype=torch.int32), non_blocking=True)

    def queue(self, width: int, bucket: Bucket) -> None:
        """Queue the step of `width` rows that `feed` asked for, or that follows the last one; it lies in `bucket`."""
        self._following = None
        self._graphs[padded(width), bucket].replay()

    def _parts(self, ids: torch.Tensor, position: int) -> Iterator[int]:
        """Queue the parts of a step of `ids` one after another; yield the width of each when it is the last one queued."""
        self._ahead, self._last = None, (ids, position)
        done = 0
        for start, width, bucket in parts(position, ids.shape[0], self.buckets):
            self.feed(ids[done : done + width], start)
            self.queue(width, bucket)
            yield width
            done += width

    def _captured(self, width: int, bucket: Bucket) -> torch.cuda.CUDAGraph:
        # A step of no rows leaves nothing behind; it compiles and loads the kernels, which a capture cannot.
        self._step.launch(width, bucket)
        torch.cuda.synchronize(self._step.state.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step.launch(width, bucket)
        return graph

    def _check_ids(self, least: int, most: int) -> None:
        if not 0 <= least <= most < self.config.vocab_size:
            wrong = least if least < 0 else most
            raise EngineError(f"token {wrong} is outside the vocabulary of {self.config.vocab_size} ids")

    def _one_row(self, token: int, position: int) -> int:
        """Queue the step of one `token` unless it is under way; return the slot its best id will be in."""
        check_positions(position, 1, self.context_tokens)
        if self._ahead is not None and self._ahead[:2] == (token, position):
            return self._ahead[2]
        self._check_ids(token, token)
        if self._following != (token, position):
            self.feed(torch.tensor([token]), position)
        return self._queue_greedy(position)

    def _result(self, slot: int) -> int | None:
        """Wait for a one-row step; return its best id, None if a logit was not finite."""
        self._events[slot].synchronize()
        best = int(self._results[slot])
        return best if best >= 0 else None

    def _queue_greedy(self, position: int) -> int:
        """Queue a one-row step of what `ids` holds, which stands at `position`; return the slot its best id will be in."""
        self._slot = (self._slot + 1) % _RESULTS
        self.queue(1, bucket_of(position, self.buckets))
        self._results[self._slot].copy_(self._step.best[0], non_blocking=True)
        self._events[self._slot].record()
        return self._slot


def _results() -> tuple[torch.Tensor, list[torch.cuda.Event]]:
    """Return int64 slots in pinned memory, and for each the event after which it holds its step's result."""
    events = [torch.cuda.Event() for _ in range(_RESULTS)]  # type: ignore[no-untyped-call]
    return torch.zeros(_RESULTS, dtype=torch.int64, pin_memory=True), events


def on_device(weights: Weights, device: torch.device, dtype: torch.dtype | None = None) -> Weights:
    """Return `weights` in the memory of `device`, as `dtype` if given; a tied head is still one tensor with the embedding."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype).contiguous()

    def layer(whole: LayerWeights) -> LayerWeights:
        parts = {name: getattr(whole, name) for name in LayerWeights.__dataclass_fields__}
        return replace(whole, **{name: moved(part) for name, part in parts.items() if part is not None})

    embedding = moved(weights.embedding)
    head = embedding if weights.head is weights.embedding else moved(weights.head)
    return Weights(embedding, tuple(map(layer, weights.layers)), moved(weights.final_norm), head)
