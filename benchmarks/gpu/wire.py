"""`python -m benchmarks.gpu.wire`: the handoff's bytes per second against a bare write of the same pieces, and converting them.

From device to device between two processes; the sender is the connector's own. Medians over rounds, each of which takes both
writes of every prompt in turn. What lands is compared with what was sent.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.gpu.cache import BLOCKS, Cache, sums
from benchmarks.gpu.child import Child, child
from benchmarks.gpu.folder import MODELS
from benchmarks.gpu.landing import LARGEST_BLOCK, SECRET, Landing, landing
from decode_daemon.convert import convert
from decode_daemon.expectation import Expectation
from handoff.claim import to_params
from handoff.messages import ModelIdentity

_WARM_ROUNDS = 2
_START_S = 120.0
_LAND_S = 20.0
_WAKE_S = 0.01  # for the transport's thread to look


@dataclass(frozen=True, slots=True)
class Prompt:
    """`blocks`: of the paged cache. "fresh" lie one behind the other, as vLLM gives them first; "scattered" do not."""

    tokens: int
    order: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """One prompt in one round, in seconds: `handoff` from the write command until all of it is known to be there."""

    handoff: float
    bare: float
    convert: float
    pieces: int


def prompts(lengths: Iterable[int], cache: Cache) -> list[Prompt]:
    """Return each length once with blocks in order and once without."""
    random, counts = Random(1), {tokens: cache.layout.blocks_for(tokens) for tokens in lengths}
    fresh = [Prompt(tokens, "fresh", tuple(range(count))) for tokens, count in counts.items()]
    return fresh + [Prompt(tokens, "scattered", tuple(random.sample(range(BLOCKS), count))) for tokens, count in counts.items()]


class Wire:
    """Both ends, and tensors like an engine's cache."""

    def __init__(self, far: Landing, near: Child, cache: Cache) -> None:
        self._far = far
        self._near = near
        self._layout = cache.layout
        shape = (cache.layers, 2, cache.kv_heads, cache.context, cache.head_dim)
        self._engine = torch.empty(shape, dtype=torch.bfloat16, device=cache.place)

    async def times(self, prompt: Prompt) -> Times:
        """Take both writes of a prompt, and convert it."""
        held, claim = self._far.reserve()
        blocks, params = list(prompt.blocks), to_params(claim)
        self._far.attend = True
        await asyncio.sleep(_WAKE_S)
        bare = await self._ask("bare", agent=self._far.agent.hex(), params=params, address=self._far.raw.address, blocks=blocks)
        self._far.attend = False
        told, arrival = await asyncio.gather(
            self._ask("handoff", params=params, tokens=prompt.tokens, blocks=blocks), self._far.arrived(held, _LAND_S)
        )
        cache = self._engine[:, :, :, : prompt.tokens]
        began = time.perf_counter()
        convert(arrival.memory, self._layout, cache[:, 0], cache[:, 1])
        converted = time.perf_counter() - began
        await self._far.release(held)
        return Times((arrival.at_ns - told["began_ns"]) / 1e9, bare["seconds"], converted, bare["pieces"])

    async def arrives(self, prompt: Prompt) -> bool:
        """Whether the bytes of the last handoff and of the last bare write are those of the sender's cache."""
        sent = (await self._ask("content", blocks=list(prompt.blocks)))["sums"]
        length = self._layout.bytes_for(prompt.tokens)
        return all(sums(memory.view(length)) == sent for memory in (self._far.slot.memory, self._far.raw))

    async def _ask(self, what: str, **values: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self._near.ask, what, within_s=_LAND_S, **values)


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Take all rounds; return a row for each prompt."""
    config, context = MODELS[options.model], max(options.prompts)
    cache = Cache(config.layers, config.kv_heads, config.head_dim, options.device, context)
    expected = Expectation(
        ModelIdentity("wire", "0" * 16, context), cache.layers, cache.kv_heads, cache.head_dim, "bfloat16", LARGEST_BLOCK
    )
    environment = {"ANCHORLEG_SECRET": SECRET} | ({"PYTHONPATH": options.vllm_path} if options.vllm_path else {})
    rows = []
    with child("benchmarks.gpu.sending", [json.dumps(asdict(cache))], environment, options.log) as near:
        place = torch.device("cpu") if options.land_on_host else cache.place
        async with landing(expected, cache.layout.bytes_for(context), place) as far:
            print(f"from {cache.place} memory to {far.slot.memory.view(1).device} memory", flush=True)
            await asyncio.to_thread(near.answer, "start", _START_S)
            wire, asked = Wire(far, near, cache), prompts(options.prompts, cache)
            taken: dict[Prompt, list[Times]] = {prompt: [] for prompt in asked}
            arrives = dict.fromkeys(asked, True)
            for turn in range(_WARM_ROUNDS + options.rounds):
                for prompt in asked:
                    times = await wire.times(prompt)
                    if turn < _WARM_ROUNDS:
                        arrives[prompt] &= await wire.arrives(prompt)
                    else:
                        taken[prompt].append(times)
            rows = [_row(options.model, prompt, taken[prompt], cache, arrives[prompt]) for prompt in asked]
    return rows


def _row(model: str, prompt: Prompt, rounds: list[Times], cache: Cache, arrives: bool) -> dict[str, Any]:
    size = cache.layout.bytes_for(prompt.tokens)
    handoff, bare, converting = (
        statistics.median(getattr(one, name) for one in rounds) for name in ("handoff", "bare", "convert")
    )
    return {
        "model": model,
        "tokens": prompt.tokens,
        "blocks": prompt.order,
        "megabytes": size / 1e6,
        "pieces": rounds[0].pieces,
        "handoff_ms": handoff * 1e3,
        "handoff_gb_per_s": size / handoff / 1e9,
        "bare_ms": bare * 1e3,
        "bare_gb_per_s": size / bare / 1e9,
        "of_bare": statistics.median(one.bare / one.handoff for one in rounds),
        "convert_ms": converting * 1e3,
        "arrives": arrives,
    }


def main() -> int:
    """Measure one shape; returns 1 when what landed is not what was sent."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.wire", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=tuple(MODELS), default="8B")
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 1024, 4096], help="their tokens")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--land-on-host", action="store_true", help="in pinned memory of the host, also for a GPU")
    parser.add_argument("--log", type=Path, default=Path("sender.log"), help="where the sender's output goes")
    parser.add_argument("--vllm-path", default="", help="PYTHONPATH of the sender's process, which imports vLLM")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    print("model tokens blocks         MB pieces handoff ms    GB/s  bare ms    GB/s  of bare convert ms")
    for row in rows:
        print(
            f"{row['model']:5} {row['tokens']:6d} {row['blocks']:9} {row['megabytes']:7.2f} {row['pieces']:6d} "
            f"{row['handoff_ms']:10.3f} {row['handoff_gb_per_s']:7.2f} {row['bare_ms']:8.3f} {row['bare_gb_per_s']:7.2f} "
            f"{row['of_bare']:8.1%} {row['convert_ms']:10.3f} {'' if row['arrives'] else 'NOT WHAT WAS SENT'}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(row["arrives"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
