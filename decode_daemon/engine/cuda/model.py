"""The CUDA step as a `StepModel`: graphs of whole steps, one for each width and bucket, and one greedy step queued ahead."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda.buckets import MAX_WIDTH, Bucket, bucket_of, padded, parts, power_of_two
from decode_daemon.engine.cuda.follower import Task
from decode_daemon.engine.cuda.graphs import Computed, Event, Replayable, captured, tell
from decode_daemon.engine.cuda.leader import Leader
from decode_daemon.engine.cuda.multiply import Packed
from decode_daemon.engine.cuda.plan import Plan
from decode_daemon.engine.cuda.quantized import QuantizedWeights, WeightsKind, check_quantizable, quantized
from decode_daemon.engine.cuda.step import Step
from decode_daemon.engine.cuda.tiled import multiplier_for
from decode_daemon.engine.cuda.waiting import recorded, wait
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
    """The weights and the KV cache of one sequence on a GPU, with steps in CUDA graphs; a `StepModel`.

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
        ranks: int = 1,
        weights_as: WeightsKind = "as-is",
    ) -> None:
        """Move `weights` to `device`, allocate the cache, compile, and capture a graph for each of `widths` and each bucket.

        `widths` must hold those (1, 2, 4, 8) that steps are padded to. `overlap` False launches each kernel after the one
        before it has ended. `plan` is for benchmarks. Steps are computed by `ranks` GPUs together, this one
        and those after it, each in a process of its own until `close`. With `weights_as` "fp8" the layers' matrices are
        quantized on the way. Raises EngineError when the GPU's memory is too small, when the ranks cannot share a model of this
        shape or do not come together, or when it cannot be quantized.
        """
        if weights_as == "fp8":
            check_quantizable(config, ranks)
        self.config = config
        self.context_tokens = context_tokens
        task = Task(config, context_tokens, tuple(sorted({1, *widths})), overlap, plan)
        self._leader = Leader(task, ranks, device) if ranks > 1 else None
        own = config if self._leader is None else self._leader.shard.config
        self.buckets = plan.attention.buckets(context_tokens, own.kv_heads, own.head_dim)
        splits = self.buckets[-1].splits
        try:
            if self._leader is None:
                multiplier = multiplier_for(config, device, quantized=weights_as == "fp8", overlap=overlap, plan=plan)
                if weights_as == "fp8":
                    there: Weights | QuantizedWeights = quantized(weights, device)
                else:
                    there = on_device(weights, device, packed=multiplier.packed)
                self._step = Step(config, there, context_tokens, splits, multiplier, overlap=overlap, plan=plan)
            else:
                self._step = self._leader.step(weights)
        except torch.OutOfMemoryError as error:
            self.close()
            raise EngineError(f"weights and KV cache do not fit {torch.cuda.get_device_name(device)}: {error}") from error
        except BaseException:
            self.close()
            raise
        self._events: Sequence[Event]
        self._results, self._events = _results() if device.type == "cuda" else _interpreted()
        self._slot = 0
        self._ahead: tuple[int, int, int] | None = None  # token, position and result slot of the step queued ahead
        self._following: tuple[int, int] | None = None  # token and position of the one-row step that needs no `feed`
        self._last = torch.zeros(1, dtype=torch.int64), 0  # ids and position of the last step that was not queued ahead
        self._graphs = {} if self._leader is None else self._leader.graphs
        try:
            for width, bucket in product(task.widths, self.buckets):
                self._graphs[width, bucket] = self._captured(width, bucket)
            if self._leader is not None:
                self._leader.all_done()
        except BaseException:
            self.close()
            raise

    @property
    def products(self) -> str:
        """What computes the products, for people."""
        return self._step.multiplier.name

    @property
    def cache(self) -> torch.Tensor:
        """Return the KV cache; whoever asks may write to it, so a step that was queued ahead counts no longer.

        Of several ranks it is the whole of all, on the first GPU: the others get their heads' part before the next step.
        """
        self._ahead = None
        if self._leader is not None:
            self._following = None  # that step would be queued without a look at what is written now
            self._leader.share(self._step.cache)
        return self._step.cache

    def close(self) -> None:
        """End the other ranks' processes; nothing can be computed any more. Not needed of a single rank."""
        if self._leader is not None:
            self._leader.close()

    def forward(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Store the KV of `ids` at `position` and on; return the logits after each; see `StepModel.forward`."""
        check_positions(position, ids.shape[0], self.context_tokens)
        self._check_ids(int(ids.min()), int(ids.max()))
        rows = [self._logits(width) for width in self._parts(ids, position)]
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
        found = [best for width in self._parts(torch.tensor(ids), position) for best in self._bests(width)]
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
        tell(self._step, ids, position)
        if self._leader is not None:
            self._leader.feed(ids.tolist(), position, self._step.cache)

    def queue(self, width: int, bucket: Bucket) -> None:
        """Queue the step of `width` rows that `feed` asked for, or that follows the last one; it lies in `bucket`."""
        self._following = None
        if self._leader is None:
            self._graphs[padded(width), bucket].replay()
        else:
            self._leader.queue(padded(width), bucket)

    def _logits(self, width: int) -> torch.Tensor:
        """Return the logits of the last step's `width` rows."""
        return self._step.logits[:width].clone() if self._leader is None else self._leader.logits(self._step, width)

    def _bests(self, width: int) -> list[int]:
        """Wait for the last step; return its rows' best ids."""
        if self._leader is None:
            wait(recorded(self._step.best.device))
        else:
            self._leader.wait()
        best: list[int] = self._step.best[:width].tolist()
        return best

    def _parts(self, ids: torch.Tensor, position: int) -> Iterator[int]:
        """Queue the parts of a step of `ids` one after another; yield the width of each when it is the last one queued."""
        self._ahead, self._last = None, (ids, position)
        done = 0
        for start, width, bucket in parts(position, ids.shape[0], self.buckets):
            self.feed(ids[done : done + width], start)
            self.queue(width, bucket)
            yield width
            done += width

    def _captured(self, width: int, bucket: Bucket) -> Replayable:
        if self._leader is not None:
            return captured(self._step, width, bucket, self._leader.wait_for_start)
        return captured(self._step, width, bucket, lambda: torch.cuda.synchronize(self._step.state.device))

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
        if self._leader is None:
            wait(self._events[slot])
        else:
            self._leader.wait(self._events[slot])
        best = int(self._results[slot])
        return best if best >= 0 else None

    def _queue_greedy(self, position: int) -> int:
        """Queue a one-row step of what `ids` holds, which stands at `position`; return the slot its best id will be in."""
        self._slot = (self._slot + 1) % _RESULTS
        self.queue(1, bucket_of(position, self.buckets))
        self._results[self._slot].copy_(self._step.best[0], non_blocking=True)
        self._events[self._slot].record()
        return self._slot


def _results() -> tuple[torch.Tensor, list[Event]]:
    """Return int64 slots in pinned memory, and for each the event after which it holds its step's result."""
    events: list[Event] = [torch.cuda.Event() for _ in range(_RESULTS)]  # type: ignore[no-untyped-call]
    return torch.zeros(_RESULTS, dtype=torch.int64, pin_memory=True), events


def _interpreted() -> tuple[torch.Tensor, list[Event]]:
    """Return the same where kernels are interpreted: what was queued has been computed."""
    return torch.zeros(_RESULTS, dtype=torch.int64), [Computed() for _ in range(_RESULTS)]


def on_device(
    weights: Weights, device: torch.device, dtype: torch.dtype | None = None, *, packed: Packed | None = None
) -> Weights:
    """Return `weights` in the memory of `device`, as `dtype` if given, each matrix `packed` there before the next one comes.

    A tied head is still one tensor with the embedding.
    """

    def moved(field: str, tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.to(device=device, dtype=dtype).contiguous()
        return there if packed is None else packed(field, there)

    def layer(whole: LayerWeights) -> LayerWeights:
        parts = {name: getattr(whole, name) for name in LayerWeights.__dataclass_fields__}
        return replace(whole, **{name: moved(name, part) for name, part in parts.items() if part is not None})

    head = moved("head", weights.head)
    embedding = head if weights.head is weights.embedding else moved("embedding", weights.embedding)
    return Weights(embedding, tuple(map(layer, weights.layers)), moved("final_norm", weights.final_norm), head)
