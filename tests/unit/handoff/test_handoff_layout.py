"""A block of grouped-query attention is readable exactly when its digits address each of its elements once."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handoff.layout import AXES, Axis, Digit, GqaBlock, KindLayout, LayoutError, contiguous_block
from tests.kit.handoff import BLOCK, LAYOUT, changed, place

SIZES = {"kv_heads": 2, "head_dim": 8, "block_tokens": 4}


def strided(block: GqaBlock, name: Axis) -> int:
    (digit,) = block.keys.axis(name)
    return digit.stride


@pytest.mark.parametrize(
    ("order", "strides", "values"),
    [
        (("kind", "token", "head", "dim"), (8, 16, 1), 64),
        (("kind", "head", "token", "dim"), (32, 8, 1), 64),
        (("token", "kind", "head", "dim"), (8, 32, 1), 16),
        (("head", "token", "kind", "dim"), (64, 16, 1), 8),
        (("kind", "head", "dim", "token"), (32, 1, 4), 64),
    ],
)
def test_a_contiguous_block_lies_in_the_given_order(
    order: tuple[Axis, ...], strides: tuple[int, int, int], values: int
) -> None:
    block = contiguous_block(dtype="bfloat16", order=order, **SIZES)
    block.validate()
    assert tuple(strided(block, name) for name in AXES) == strides
    assert (block.keys.offset, block.values.offset) == (0, values)


def test_places_follow_the_digits() -> None:
    kind = KindLayout(3, head=(Digit(2, 100),), token=(Digit(2, 2), Digit(2, 1)), dim=(Digit(2, 20), Digit(3, 50)))
    expected = [place(kind, head, token, dim) for head in range(2) for token in range(4) for dim in range(6)]
    assert kind.places() == expected


@st.composite
def blocks(draw: st.DrawFn) -> GqaBlock:
    """A valid block: each axis split into digits at random, all digits in any order."""
    sizes: dict[Axis, list[int]] = {name: draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3)) for name in AXES}
    parts: list[tuple[str, int]] = [(name, index) for name in AXES for index in range(len(sizes[name]))]
    order = draw(st.permutations([*parts, ("kind", 0)]))
    strides: dict[tuple[str, int], int] = {}
    stride = 1
    for name, index in order:
        strides[name, index] = stride
        stride *= 2 if name == "kind" else sizes[name][index]  # type: ignore[index]
    digits = {name: tuple(Digit(size, strides[name, index]) for index, size in enumerate(sizes[name])) for name in AXES}
    return GqaBlock(
        kv_heads=math.prod(sizes["head"]),
        block_tokens=math.prod(sizes["token"]),
        head_dim=math.prod(sizes["dim"]),
        dtype="float32",
        keys=KindLayout(offset=0, **digits),
        values=KindLayout(offset=strides["kind", 0], **digits),
    )


@given(blocks())
def test_every_order_of_digits_is_readable(block: GqaBlock) -> None:
    block.validate()


@given(blocks(), st.sampled_from(["keys", "values"]), st.sampled_from(AXES), st.integers(-5, 50), st.data())
def test_a_block_with_one_wrong_digit_is_refused(
    block: GqaBlock, kind_name: str, axis: Axis, value: int, data: st.DataObject
) -> None:
    kind: KindLayout = getattr(block, kind_name)
    digits = list(kind.axis(axis))
    index = data.draw(st.integers(0, len(digits) - 1))
    old = digits[index]
    digits[index] = data.draw(st.sampled_from([Digit(value, old.stride), Digit(old.size, value)]))
    wrong = msgspec.structs.replace(block, **{kind_name: msgspec.structs.replace(kind, **{axis: tuple(digits)})})
    if sorted(wrong.keys.places() + wrong.values.places()) == list(range(block.elements)) and digits[index].size == old.size:
        wrong.validate()  # a digit of one value may have any stride
    else:
        with pytest.raises(LayoutError):
            wrong.validate()


digits = st.lists(st.builds(Digit, st.integers(1, 3), st.integers(0, 8)), min_size=1, max_size=2).map(tuple)
any_kind = st.builds(KindLayout, st.integers(0, 8), head=digits, token=digits, dim=digits)


@given(any_kind, any_kind, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_a_block_is_refused_unless_it_is_a_permutation(
    keys: KindLayout, values: KindLayout, heads: int, tokens: int, dims: int
) -> None:
    block = GqaBlock(heads, dims, tokens, "float32", keys, values)
    places = sorted(keys.places() + values.places())
    sizes = {"head": heads, "token": tokens, "dim": dims}
    fits = all(math.prod(digit.size for digit in kind.axis(name)) == sizes[name] for kind in (keys, values) for name in AXES)
    if fits and places == list(range(block.elements)):
        block.validate()
    else:
        with pytest.raises(LayoutError):
            block.validate()


@given(blocks(), st.data())
def test_two_elements_in_one_place_are_refused(block: GqaBlock, data: st.DataObject) -> None:
    """Any digit of more than one value whose stride becomes another digit's, which then addresses the same elements."""
    found = [(axis, index) for axis in AXES for index, digit in enumerate(block.keys.axis(axis)) if digit.size > 1]
    if len(found) < 2:
        return
    (axis, index), (other, its) = data.draw(st.permutations(found))[:2]
    digits = list(block.keys.axis(axis))
    digits[index] = Digit(digits[index].size, block.keys.axis(other)[its].stride)
    wrong = msgspec.structs.replace(block, keys=msgspec.structs.replace(block.keys, **{axis: tuple(digits)}))
    with pytest.raises(LayoutError, match="each element once"):
        wrong.validate()


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("digits", [(), (Digit(1, 1),) * 17])
def test_an_axis_without_digits_or_with_a_crowd_of_them_is_refused_by_name(axis: str, digits: tuple[Digit, ...]) -> None:
    wrong = changed(LAYOUT, keys=msgspec.structs.replace(BLOCK.keys, **{axis: digits}))
    with pytest.raises(LayoutError, match=f"{axis} has {len(digits)} digits"):
        wrong.validate()


@pytest.mark.parametrize("offset", [-1, 1, 64])
def test_keys_beside_their_place_are_refused(offset: int) -> None:
    wrong = changed(LAYOUT, keys=msgspec.structs.replace(BLOCK.keys, offset=offset))
    with pytest.raises(LayoutError, match="each element once"):
        wrong.validate()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", "float8_e4m3", "dtype 'float8_e4m3'"),
        ("kv_heads", 0, "elements at the most"),
        ("head_dim", -8, "elements at the most"),
        ("block_tokens", 1 << 40, "elements at the most"),
        ("kv_heads", 3, "head digits make 2 values, not 3"),
        ("block_tokens", 5, "token digits make 4 values, not 5"),
    ],
)
def test_a_block_of_wrong_sizes_is_refused_by_name(field: str, value: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        changed(LAYOUT, **{field: value}).blocks[0].validate()
