"""Latent rows and index keys against readers that take every byte by its place."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_daemon.convert_latent import convert_index, convert_latent
from handoff.layout import IndexBlock, KVLayout, LatentBlock, LatentForm, Layer
from tests.kit.layouts import fp8_value


def bfloat16_at(raw: bytes, place: int) -> float:
    (value,) = struct.unpack("<f", b"\0\0" + raw[place : place + 2])
    return float(value)


def float32_at(raw: bytes, place: int) -> float:
    (value,) = struct.unpack_from("<f", raw, place)
    return float(value)


def scaled(byte: int, scale: float) -> float:
    """A product in float32."""
    return float(torch.tensor(fp8_value(byte, "float8_e4m3fn")) * torch.tensor(scale))


def latent_row(raw: bytes, block: LatentBlock, token: int) -> tuple[list[float], list[float]]:
    """The latent and the rope part of one token, whose blocks begin at `raw`."""
    if block.form == "bfloat16":
        row = token * 2 * (block.latent_dim + block.rope_dim)
        latent = [bfloat16_at(raw, row + 2 * dim) for dim in range(block.latent_dim)]
        rope = row + 2 * block.latent_dim
    else:
        row = token * (block.latent_dim + block.latent_dim // 32 + 2 * block.rope_dim)
        scales = row + block.latent_dim
        latent = [scaled(raw[row + dim], float32_at(raw, scales + dim // 128 * 4)) for dim in range(block.latent_dim)]
        rope = scales + block.latent_dim // 32
    return latent, [bfloat16_at(raw, rope + 2 * dim) for dim in range(block.rope_dim)]


def index_row(raw: bytes, block: IndexBlock, token: int) -> list[float]:
    """The index key of one token: its page's values come first, then its page's scales."""
    page, inside = divmod(token, block.block_tokens)
    start = page * block.block_tokens * (block.dim + block.dim // 32)
    scales = start + block.block_tokens * block.dim
    return [
        scaled(raw[start + inside * block.dim + dim], float32_at(raw, scales + (inside * block.dim + dim) // 128 * 4))
        for dim in range(block.dim)
    ]


def random_bytes(layout: KVLayout, tokens: int, seed: int) -> torch.Tensor:
    """A landing region of random bytes with finite scales, and the larger slot's rest."""
    generator = torch.Generator().manual_seed(seed)
    landed = torch.randint(0, 256, (layout.bytes_for(tokens) + 100,), dtype=torch.uint8, generator=generator)
    for index, start in enumerate(layout.offsets(tokens)):
        block = layout.block(index)
        raw = landed[start : start + layout.blocks_for(tokens) * block.block_bytes]
        if isinstance(block, IndexBlock):
            scales = raw.view(-1, block.block_bytes)[:, block.block_tokens * block.dim :]
        elif isinstance(block, LatentBlock) and block.form == "fp8_ds_mla":
            scales = raw.view(-1, block.row_bytes)[:, block.latent_dim : -2 * block.rope_dim]
        else:
            continue
        shape = (scales.shape[0], scales.shape[1] // 4)
        scales.copy_(torch.rand(shape, generator=generator).view(torch.uint8))
    return landed


def of_layer(layout: KVLayout, landed: torch.Tensor, layer: int, tokens: int) -> bytes:
    return bytes(landed[layout.offsets(tokens)[layer] :].numpy())


def assert_equal(found: torch.Tensor, expected: list[list[float]]) -> None:
    wanted = torch.tensor(expected, dtype=torch.float32).to(found.dtype)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def sparse(block_tokens: int, form: LatentForm, latent_dim: int, rope_dim: int, index_dim: int) -> KVLayout:
    """Two layers with an index each, and one more of latent rows only, as a draft layer may have."""
    layers = (Layer("0.attn", 0), Layer("0.index", 1), Layer("1.attn", 0), Layer("1.index", 1), Layer("2.attn", 0))
    layout = KVLayout(layers, (LatentBlock(block_tokens, latent_dim, rope_dim, form), IndexBlock(block_tokens, index_dim)))
    layout.validate()
    return layout


layouts = st.builds(
    sparse,
    st.integers(1, 5),
    st.sampled_from(["bfloat16", "fp8_ds_mla"]),
    st.sampled_from([128, 256]),
    st.sampled_from([2, 8, 64]),
    st.sampled_from([128, 256]),
)


@settings(deadline=None, max_examples=20)
@given(layouts, st.integers(1, 11), st.sampled_from([torch.float32, torch.bfloat16]))
def test_each_layers_rows_are_those_read_byte_by_byte(layout: KVLayout, tokens: int, dtype: torch.dtype) -> None:
    landed = random_bytes(layout, tokens, tokens)
    latent, index = layout.blocks
    assert isinstance(latent, LatentBlock)
    assert isinstance(index, IndexBlock)
    latents, ropes = (
        torch.empty(3, tokens, latent.latent_dim, dtype=dtype),
        torch.empty(3, tokens, latent.rope_dim, dtype=dtype),
    )
    keys = torch.empty(2, tokens, index.dim, dtype=dtype)
    convert_latent(landed, layout, latents, ropes)
    convert_index(landed, layout, keys)
    for number, layer in enumerate((0, 2, 4)):
        rows = [latent_row(of_layer(layout, landed, layer, tokens), latent, token) for token in range(tokens)]
        assert_equal(latents[number], [row for row, _ in rows])
        assert_equal(ropes[number], [rope for _, rope in rows])
    for number, layer in enumerate((1, 3)):
        raw = of_layer(layout, landed, layer, tokens)
        assert_equal(keys[number], [index_row(raw, index, token) for token in range(tokens)])


def test_the_sizes_of_deepseek_and_glm_are_read() -> None:
    layout = KVLayout((Layer("attn", 0), Layer("index", 1)), (LatentBlock(64, form="fp8_ds_mla"), IndexBlock(64)))
    landed = random_bytes(layout, 70, 3)
    latents, ropes, keys = torch.empty(1, 70, 512), torch.empty(1, 70, 64), torch.empty(1, 70, 128)
    convert_latent(landed, layout, latents, ropes)
    convert_index(landed, layout, keys)
    block, pages = layout.blocks
    assert isinstance(block, LatentBlock)
    assert isinstance(pages, IndexBlock)
    for token in (0, 63, 64, 69):
        latent, rope = latent_row(of_layer(layout, landed, 0, 70), block, token)
        assert_equal(latents[0, token : token + 1], [latent])
        assert_equal(ropes[0, token : token + 1], [rope])
        assert_equal(keys[0, token : token + 1], [index_row(of_layer(layout, landed, 1, 70), pages, token)])


def test_targets_of_another_number_of_layers_are_refused() -> None:
    layout = sparse(4, "bfloat16", 128, 8, 128)
    landed = random_bytes(layout, 4, 0)
    with pytest.raises(ValueError, match="shorter"):
        convert_latent(landed, layout, torch.empty(2, 4, 128), torch.empty(2, 4, 8))
