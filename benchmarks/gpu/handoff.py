"""`python -m benchmarks.gpu.handoff`: vLLM's KV through the transport into the engine, compared element by element, and timed.

One vLLM of random weights, the connector in it, and in this process a landing slot and the engine on the same device.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.gpu.child import Child, child
from benchmarks.gpu.folder import MODELS, write_folder
from benchmarks.gpu.landing import LARGEST_BLOCK, SECRET, Landing, landing
from benchmarks.gpu.prefill import NAME, Options
from benchmarks.gpu.prompts import HIT, Prompt, prompts
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.protocol import DecodeParams, SamplingParams
from decode_daemon.engine.steps import StepModel, choose_step
from decode_daemon.engine.weights import load_weights
from decode_daemon.expectation import Expectation
from decode_daemon.runner import EngineRunner, Timings
from handoff.claim import to_params
from handoff.identity import model_digest
from handoff.messages import ModelIdentity

ANSWER = 64  # tokens, the first included
MAX_GAP = 0.25  # nats behind vLLM's own choice, as the demo judges (cli/neartie.py)
# Of a token's keys or values in one layer, which the engine computes too, in another order of additions and all in bfloat16:
# many times what rounding makes of it, and far under what another token's would be (1.4).
MAX_ERROR = 0.3
_RECORDED = "recorded_blocks"  # benchmarks/gpu/recording.py, which imports vLLM
_START_S = 240.0
_LAND_S = 30.0
_ROWS = 512  # of one forward


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prompt. Times in milliseconds: `landing_ms` from the first accepted writer, `first_step_ms` from the last byte."""

    name: str
    tokens: int
    cached: int  # of vLLM's prefix cache
    megabytes: float
    unequal: int  # elements of the engine's cache that are not vLLM's, bit for bit
    error: float  # relative, of vLLM's KV against what the engine computes for the same ids; the worst token
    same: int  # ids of the answer before the first that differs from vLLM's own
    gap: float  # the largest, in nats
    landing_ms: float
    convert_ms: float
    first_step_ms: float

    @property
    def right(self) -> bool:
        """Whether the handoff was exact, and the answer vLLM's or parted from it at near ties only; a NaN never is.

        A prompt that was to be found in the prefix cache, and was not, proves nothing.
        """
        as_meant = (self.cached > 0) == (self.name == HIT)
        return as_meant and self.unequal == 0 and self.error <= MAX_ERROR and self.gap <= MAX_GAP


class Proof:
    """Both legs."""

    def __init__(self, vllm: Child, far: Landing, model: StepModel, folder: Path) -> None:
        self._vllm = vllm
        self._far = far
        self._model = model
        self._folder = folder
        self._converted: list[float] = []
        self._runner = EngineRunner(LlamaEngine(model), Timings(self._converted.append, lambda seconds, tokens: None))
        self.cache = ""  # what vLLM's looks like

    async def outcome(self, prompt: Prompt) -> Outcome:
        """Hand over one prompt, decode after it, and compare with all that vLLM and the engine say of it."""
        ids, tokens = list(prompt.ids), len(prompt.ids)
        held, claim = self._far.reserve()
        told, arrival = await asyncio.gather(
            asyncio.to_thread(self._vllm.ask, "generate", prompt=ids, tokens=1, params=to_params(claim)),
            self._far.arrived(held, _LAND_S),
        )
        params = DecodeParams(SamplingParams(temperature=0.0), ANSWER, frozenset(), speculate=False)
        answer, first_ns = [arrival.landed.first_token], 0
        async for step in self._runner.run(arrival.landed, arrival.memory, params):
            first_ns = first_ns or time.monotonic_ns()
            answer += step.ids
        await self._far.release(held)
        injected = self._held_kv(tokens)
        own = self._saved(told["params"][_RECORDED], tokens)  # before another request may get the blocks
        plain = (await asyncio.to_thread(self._vllm.ask, "generate", prompt=ids, tokens=ANSWER, params=None))["ids"]
        gaps = [0.0]
        if plain != answer:
            gaps = (await asyncio.to_thread(self._vllm.ask, "gaps", prompt=ids, said=answer))["gaps"]
        return Outcome(
            name=prompt.name,
            tokens=tokens,
            cached=told["cached"] or 0,
            megabytes=arrival.landed.bytes / 1e6,
            unequal=_unequal(injected, own),
            error=_error(injected, self._computed(ids)),
            same=next((at for at, (one, other) in enumerate(zip(plain, answer, strict=False)) if one != other), len(answer)),
            gap=max(gaps),
            landing_ms=arrival.landed.seconds * 1e3,
            convert_ms=self._converted[-1] * 1e3,
            first_step_ms=(first_ns - arrival.at_ns) / 1e6,
        )

    def close(self) -> None:
        """End the engine's thread."""
        self._runner.close()

    def _saved(self, blocks: Sequence[int], tokens: int) -> torch.Tensor:
        """Return what vLLM's own cache holds, [2, layers, heads, tokens, dim]."""
        path = self._folder / "kv.pt"
        self.cache = self._vllm.ask("save_kv", blocks=list(blocks), tokens=tokens, path=str(path))["cache"]
        found: torch.Tensor = torch.load(path, weights_only=True)
        path.unlink()
        return found

    @torch.inference_mode()
    def _computed(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the KV that the engine computes for a prompt, as `_saved` does."""
        for start in range(0, len(ids), _ROWS):
            self._model.forward(torch.tensor(ids[start : start + _ROWS]), start)
        return self._held_kv(len(ids))

    def _held_kv(self, tokens: int) -> torch.Tensor:
        """Return what the engine's cache holds, as `_saved` does."""
        return self._model.cache[:, :, :, :tokens].transpose(0, 1).to("cpu", copy=True)


def _unequal(found: torch.Tensor, wanted: torch.Tensor) -> int:
    """Count unequal bits' elements: equal numbers of other bits (0 and -0) are unequal."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    bits = torch.int16 if found.element_size() == 2 else torch.int32
    return int((found.contiguous().view(bits) != wanted.contiguous().view(bits)).sum())


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error of the worst token's keys or values of a layer."""
    found, wanted = (one.transpose(2, 3).flatten(3).float() for one in (found, wanted))
    return float(((found - wanted).norm(dim=3) / wanted.norm(dim=3)).max())


async def prove(options: argparse.Namespace, folder: Path) -> list[Outcome]:
    """Start both legs, take every prompt in turn, and print a line for each."""
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    write_folder(folder, MODELS[options.model], device)
    config = LlamaConfig.read(folder)
    context = max(options.prompts) + 512
    expected = Expectation(
        model=ModelIdentity(NAME, model_digest(folder), context),
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=options.dtype,
        block_tokens=LARGEST_BLOCK,
    )
    dtype: torch.dtype = getattr(torch, options.dtype)
    slot_bytes = 2 * dtype.itemsize * config.layers * config.kv_heads * config.head_dim * (context + LARGEST_BLOCK)
    start = Options(str(folder), context, options.chunk or context, options.block, options.device, options.dtype)
    environment = {
        "ANCHORLEG_SECRET": SECRET,
    }
    environment |= {"PYTHONPATH": options.vllm_path} if options.vllm_path else {}
    environment |= {"VLLM_KV_CACHE_LAYOUT": options.layout} if options.layout else {}
    outcomes = []
    with ExitStack() as stack:
        vllm = stack.enter_context(child("benchmarks.gpu.prefill", [json.dumps(asdict(start))], environment, options.log))
        weights = load_weights(folder, config, dtype)
        model = choose_step(config, weights, context, pin=False)
        async with landing(expected, slot_bytes, model.cache.device) as far:
            print(f"landing in {far.slot.memory.view(1).device} memory, engine on {model.cache.device}", flush=True)
            await asyncio.to_thread(vllm.answer, "start", _START_S)
            proof = Proof(vllm, far, model, folder)
            stack.callback(proof.close)
            for prompt in prompts(options.prompts, config.vocab_size):
                outcomes.append(await proof.outcome(prompt))
                _print(outcomes[-1])
            print(f"vLLM's cache: {proof.cache}", flush=True)
    return outcomes


def _print(one: Outcome) -> None:
    print(
        f"{'ok    ' if one.right else 'FAILED'} {one.name}: {one.tokens} tokens, {one.cached} cached, {one.megabytes:.2f} MB, "
        f"{one.unequal} elements unlike vLLM's, KV error {one.error:.4f} (at most {MAX_ERROR}), ids the same up to {one.same} "
        f"of {ANSWER}, gap {one.gap:.3f} nats (at most {MAX_GAP}); landing {one.landing_ms:.2f} ms, converting "
        f"{one.convert_ms:.2f} ms, last byte to first step {one.first_step_ms:.2f} ms",
        flush=True,
    )


def main() -> int:
    """Prove one configuration; returns 1 when some prompt's handoff was not right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.handoff", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=tuple(MODELS), default="1B")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="the CUDA step knows the first only"
    )
    parser.add_argument("--layout", choices=("NHD", "HND"), help="vLLM's VLLM_KV_CACHE_LAYOUT")
    parser.add_argument("--chunk", type=int, default=0, help="most tokens of one step of vLLM; 0: whole prompts")
    parser.add_argument("--block", type=int, default=0, help="tokens of one block; 0 leaves it to vLLM")
    parser.add_argument("--prompts", type=int, nargs="*", default=[1, 15, 16, 17, 1000, 4000], help="their tokens")
    parser.add_argument("--vllm-path", default="", help="PYTHONPATH of vLLM's process")
    parser.add_argument("--log", type=Path, default=Path("vllm.log"), help="where vLLM's output goes")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = asyncio.run(prove(options, Path(folder, "model")))
    wrong = sum(not one.right for one in outcomes)
    print(f"handoff {options.model} {options.layout or ''}: {len(outcomes) - wrong} right, {wrong} wrong", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
