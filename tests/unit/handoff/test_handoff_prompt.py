"""A prompt's ids travel as bytes, and no two prompts have the same digest."""

import pytest

from handoff.prompt import digest, packed


def test_an_id_takes_four_bytes_the_smallest_first() -> None:
    assert packed([1, 258, 2**32 - 1]) == bytes([1, 0, 0, 0, 2, 1, 0, 0, 255, 255, 255, 255])


@pytest.mark.parametrize("other", [[2, 2, 3], [1, 2], [1, 2, 3, 0], [2, 1, 3], []])
def test_prompts_that_differ_anywhere_have_other_digests(other: list[int]) -> None:
    assert digest(packed(other)) != digest(packed([1, 2, 3]))
    assert digest(packed((1, 2, 3))) == digest(packed([1, 2, 3]))
