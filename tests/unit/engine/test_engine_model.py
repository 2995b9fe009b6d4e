"""The step computes what transformers computes, for every family and variation the engine accepts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.model import LlamaModel
from decode_daemon.engine.protocol import DecodeParams, EngineError, SamplingParams
from decode_daemon.engine.weights import load_weights
from tests.kit.families import FAMILIES, LLAMA3_ROPE, PROMPT

Tiny = Callable[..., tuple[Path, Any]]

families = pytest.mark.parametrize(("family", "changes"), FAMILIES.values(), ids=FAMILIES.keys())


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    # Both are float32 with sums taken in another order; logits here reach about 20.
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-4)


def load(folder: Path, dtype: torch.dtype = torch.float32, context_tokens: int = 64) -> LlamaModel:
    config = LlamaConfig.read(folder)
    return LlamaModel(config, load_weights(folder, config, dtype), context_tokens)


def one_by_one(model: LlamaModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([model.forward(torch.tensor([token]), at) for at, token in enumerate(ids)])


def reference_logits(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([ids])).logits[0]
    return logits


@families
def test_logits_equal_those_of_transformers_in_float32(tiny: Tiny, family: str, changes: dict[str, Any]) -> None:
    folder, reference = tiny(family, **changes)
    assert_same(one_by_one(load(folder), PROMPT), reference_logits(reference, PROMPT))


@families
def test_decoding_from_an_injected_prefill_continues_as_transformers_does(
    tiny: Tiny, family: str, changes: dict[str, Any]
) -> None:
    folder, reference = tiny(family, **changes)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        prefill = reference(ids, use_cache=True)
        wanted = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    engine = LlamaEngine.load(folder, dtype=torch.float32, context_tokens=64, threads=None)
    keys, values = engine.kv_target(len(PROMPT))
    for index, layer in enumerate(prefill.past_key_values.layers):
        keys[index].copy_(layer.keys[0])
        values[index].copy_(layer.values[0])

    first = int(prefill.logits[0, -1].argmax())
    params = DecodeParams(SamplingParams(temperature=0.0), max_tokens=24, stop_token_ids=frozenset())
    rest = [token for step in engine.decode(PROMPT, first, params, lambda: False) for token in step.ids]

    assert [first, *rest] == wanted[0, len(PROMPT) :].tolist()


def test_the_older_rope_fields_mean_what_the_newer_ones_do(tiny: Tiny) -> None:
    folder, reference = tiny(rope_parameters=LLAMA3_ROPE)
    config = (folder / "config.json").read_text()
    older = config.replace('"rope_parameters"', '"rope_scaling"')
    assert older != config
    (folder / "config.json").write_text(older)
    assert_same(one_by_one(load(folder), PROMPT), reference_logits(reference, PROMPT))


def test_several_rows_in_one_step_give_the_logits_and_cache_of_single_steps(tiny: Tiny) -> None:
    folder, _ = tiny()
    single, wide = load(folder), load(folder)
    wanted = one_by_one(single, PROMPT)
    one_by_one(wide, PROMPT[:8])
    with torch.inference_mode():
        got = wide.forward(torch.tensor(PROMPT[8:]), 8)
    assert_same(got, wanted[8:])
    assert_same(wide.cache, single.cache)


def test_a_step_reads_no_position_beyond_its_own(tiny: Tiny) -> None:
    folder, _ = tiny()
    clean, dirty = load(folder), load(folder)
    dirty.cache.fill_(torch.nan)
    assert torch.equal(one_by_one(dirty, PROMPT), one_by_one(clean, PROMPT))


def test_a_step_allocates_no_more_in_a_long_sequence_than_in_a_short_one(tiny: Tiny) -> None:
    folder, _ = tiny(max_position_embeddings=4096)
    model = load(folder, context_tokens=4096)

    def largest_allocation(position: int) -> int:
        with torch.inference_mode(), torch.profiler.profile(profile_memory=True) as profile:
            model.forward(torch.tensor([5]), position)
        return max(int(event.self_cpu_memory_usage) for event in profile.events())

    largest_allocation(8)  # the profiler's first run also records its own start
    assert largest_allocation(4000) <= largest_allocation(3000) < 4000 * model.config.head_dim * 4


def test_bfloat16_stays_within_its_rounding_of_float32(tiny: Tiny) -> None:
    folder, reference = tiny()
    wanted = reference_logits(reference, PROMPT)
    error = one_by_one(load(folder, torch.bfloat16), PROMPT).float() - wanted
    # Eight bits of mantissa through two layers: a wrong formula is off by tens of percent.
    assert (error.norm() / wanted.norm()).item() < 0.03


def test_a_position_outside_the_context_is_refused(tiny: Tiny) -> None:
    folder, _ = tiny()
    model = load(folder, context_tokens=4)
    with pytest.raises(EngineError, match="context of 4 tokens"):
        model.forward(torch.tensor([1, 2]), 3)
