"""vLLM's fp8 caches: the probe finds their order whatever the scale, and a daemon reads what vLLM's own attention reads."""

import pytest
import torch
from vllm import _custom_ops as ops

from connector.probe import Elements, backend_update, probe_block
from decode_daemon.convert import convert
from handoff.layout import KVLayout, Layer
from tests.kit.vllm_caches import CPU_ISAS, cpu_layer, with_fp8_caches

HEADS, DIM, TOKENS = 3, 64, 32
FORMATS = [("fp8", torch.float8_e4m3fn, 1 / 8), ("fp8_e5m2", torch.float8_e5m2, 1 / 4)]

pytestmark = with_fp8_caches


@pytest.mark.parametrize("isa", [isa for isa in CPU_ISAS if isa != "vec16"])  # which vLLM has not for fp8
@pytest.mark.parametrize(("cache_dtype", "stored", "step"), FORMATS)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.37, 3.0)])
def test_vllms_own_fp8_cache_is_read_back_to_a_step_of_fp8(
    isa: str, cache_dtype: str, stored: torch.dtype, step: float, scales: tuple[float, float]
) -> None:
    tokens = 77
    update = backend_update(cpu_layer(isa, cache_dtype, *scales))
    cache = torch.zeros(4, HEADS, TOKENS, 2 * DIM, dtype=torch.uint8)
    layout = found(cache, isa, cache_dtype, stored, scales)
    # Magnitudes that fp8 has in full precision with either scale.
    given = torch.rand(2, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(1)) * 4 + 0.25
    given = (given * torch.tensor([1, -1])[torch.arange(DIM) % 2]).to(torch.bfloat16)
    update(given[0], given[1], cache, torch.arange(TOKENS, TOKENS + tokens))
    read = torch.empty(2, 1, HEADS, tokens, DIM)
    convert(cache[1:].flatten(), layout, read[0], read[1])
    wanted = given.to(torch.float32).transpose(1, 2).unsqueeze(1)
    assert ((read - wanted).abs() <= step * wanted.abs()).all()


@pytest.mark.parametrize(("cache_dtype", "stored"), [(name, stored) for name, stored, _ in FORMATS])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
def test_values_are_read_as_vllms_own_attention_reads_them(cache_dtype: str, stored: torch.dtype, given: torch.dtype) -> None:
    """Attention to one position gives its value, whatever the query and the key are."""
    blocks, scales = 40, (0.37, 2.0)
    update = backend_update(cpu_layer("vec", cache_dtype, *scales))
    cache = torch.zeros(blocks, HEADS, TOKENS, 2 * DIM, dtype=torch.uint8)
    query, keys, values = (2 * torch.randn(3, blocks, HEADS, DIM, generator=torch.Generator().manual_seed(2))).to(given)
    update(keys, values, cache, torch.arange(blocks) * TOKENS)  # each alone in its block
    attended = attention(query, cache, cache_dtype, scales)
    layout = found(cache, "vec", cache_dtype, stored, scales)
    for block in range(blocks):
        read = torch.empty(2, 1, HEADS, 1, DIM, dtype=given)
        convert(cache[block].flatten(), layout, read[0], read[1])
        assert torch.equal(read[1, 0, :, 0], attended[block])


def found(cache: torch.Tensor, isa: str, cache_dtype: str, stored: torch.dtype, scales: tuple[float, float]) -> KVLayout:
    update, elements = backend_update(cpu_layer(isa, cache_dtype, *scales)), Elements(stored, torch.bfloat16, *scales)
    block = probe_block(update, cache, kv_heads=HEADS, head_dim=DIM, block_tokens=TOKENS, elements=elements)
    layout = KVLayout((Layer("one", 0, *scales),), (block,))
    layout.validate()
    return layout


def attention(query: torch.Tensor, cache: torch.Tensor, cache_dtype: str, scales: tuple[float, float]) -> torch.Tensor:
    """What vLLM's attention makes of one query a block, each with one position."""
    blocks = cache.shape[0]
    keys, values = cache.view(blocks, HEADS, 2 * TOKENS, DIM).chunk(2, dim=2)
    starts, lengths = torch.arange(blocks + 1, dtype=torch.int32), torch.ones(blocks, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        blocks, HEADS, HEADS, DIM, lengths, query.dtype, starts, True, -1, "vec", False, None, cache_dtype
    )
    output = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=starts,
        seq_lens=lengths,
        scale=1.0,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=torch.arange(blocks, dtype=torch.int32).unsqueeze(1),
        softcap=0.0,
        scheduler_metadata=plan,
        s_aux=None,
        k_scale=scales[0],
        v_scale=scales[1],
        kv_cache_dtype=cache_dtype,
    )
    return output
