"""How positions and matrices are divided on a GPU: what a row's bits depend on must not depend on the width of its step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_daemon.engine.cuda.buckets import MAX_WIDTH, bucket_of, buckets, padded, parts, power_of_two
from decode_daemon.engine.cuda.tiles import tile_for

CONTEXTS = st.integers(1, 200_000)
HEADS = st.integers(1, 64)
DIMS = st.sampled_from((32, 64, 128, 256))


@given(CONTEXTS, HEADS, DIMS)
def test_splits_and_tiles_divide_a_bucket_evenly(context: int, kv_heads: int, head_dim: int) -> None:
    for bucket in buckets(context, kv_heads, head_dim):
        assert bucket.splits * bucket.chunk == bucket.tokens
        assert bucket.chunk % bucket.tile == 0
        assert bucket.splits == power_of_two(bucket.splits) <= 128


@given(CONTEXTS, HEADS, DIMS, st.data())
def test_every_position_has_the_smallest_bucket_that_holds_it(
    context: int, kv_heads: int, head_dim: int, data: st.DataObject
) -> None:
    found = buckets(context, kv_heads, head_dim)
    position = data.draw(st.integers(0, context - 1))
    bucket = bucket_of(position, found)
    assert position < bucket.tokens
    assert all(other.tokens <= position for other in found if other.tokens < bucket.tokens)


@given(CONTEXTS, st.data())
def test_rows_are_cut_into_steps_that_stay_in_their_bucket(context: int, data: st.DataObject) -> None:
    found = buckets(context, 8, 128)
    position = data.draw(st.integers(0, context - 1))
    width = data.draw(st.integers(1, min(context - position, 40)))
    steps = list(parts(position, width, found))
    rows = [(start + n, bucket) for start, rows, bucket in steps for n in range(rows)]
    assert [row for row, _ in rows] == list(range(position, position + width))
    assert all(bucket == bucket_of(row, found) for row, bucket in rows)
    assert all(1 <= rows <= MAX_WIDTH for _, rows, _ in steps)


def test_a_step_across_a_buckets_end_becomes_two() -> None:
    found = buckets(4096, 8, 128)
    assert [(start, rows, bucket.tokens) for start, rows, bucket in parts(1020, 8, found)] == [
        (1020, 4, 1024),
        (1024, 4, 2048),
    ]


def test_widths_are_padded_to_powers_of_two() -> None:
    assert [padded(width) for width in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize("gated", [False, True])
@given(inputs=st.integers(1, 40_000), outputs=st.integers(1, 300_000))
def test_a_tile_gives_every_thread_eight_inputs_of_a_pass_at_most(gated: bool, inputs: int, outputs: int) -> None:
    tile = tile_for(inputs, outputs, gated=gated)
    assert tile.columns == power_of_two(tile.columns) <= 256 * tile.warps
    assert tile.warps in (1, 2, 4)
    assert tile.columns // 2 < max(inputs, 8)
