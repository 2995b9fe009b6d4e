"""What the prompt and the answer so far foretell."""

from collections.abc import Sequence
from random import Random

import pytest

from decode_daemon.engine.drafts import LENGTHS, NgramDrafter


def begun(*ids: int) -> NgramDrafter:
    drafter = NgramDrafter()
    drafter.begin(ids)
    return drafter


def searched(ids: Sequence[int], count: int) -> tuple[str, list[int]] | None:
    """What a search through the whole sequence finds: the source's name, and the draft."""
    for length in LENGTHS:
        suffix = list(ids[-length:])
        for end in range(len(ids) - 1, length - 1, -1):
            if list(ids[end - length : end]) == suffix:
                draft = list(ids)
                for nth in range(count):
                    draft.append(draft[end + nth])
                return f"ngram-{length}", draft[len(ids) :]
    return None


def found(drafter: NgramDrafter, count: int) -> tuple[str, list[int]] | None:
    source = drafter.source()
    return None if source is None else (source.name, list(drafter.draft(count)))


def test_the_longest_suffix_that_occurred_before_is_followed() -> None:
    assert found(begun(1, 2, 3, 50, 9, 3, 60, 1, 2, 3), 2) == ("ngram-2", [50, 9])
    assert found(begun(7, 3, 60, 8, 3), 2) == ("ngram-1", [60, 8])


def test_of_equal_suffixes_the_latest_is_followed() -> None:
    assert found(begun(1, 2, 50, 1, 2, 60, 1, 2), 1) == ("ngram-2", [60])


def test_what_never_occurred_before_has_no_source() -> None:
    for drafter in (begun(), begun(1), begun(1, 2, 3)):
        assert drafter.source() is None
        assert list(drafter.draft(3)) == []


def test_a_draft_that_reaches_the_end_repeats_itself() -> None:
    assert found(begun(5, 1, 2, 3, 1, 2, 3), 7) == ("ngram-2", [1, 2, 3, 1, 2, 3, 1])
    assert found(begun(4, 4), 5) == ("ngram-1", [4] * 5)


@pytest.mark.parametrize("vocab", [2, 4, 30])
def test_it_finds_what_a_search_through_everything_finds(vocab: int) -> None:
    random = Random(vocab)
    for _ in range(60):
        ids = [random.randrange(vocab) for _ in range(random.randint(0, 40))]
        drafter = begun(*ids)
        for _ in range(12):
            count = random.randint(1, 7)
            assert found(drafter, count) == searched(ids, count)
            step = [random.randrange(vocab) for _ in range(random.randint(1, 5))]
            ids += step
            drafter.saw(step, None)


def test_of_a_long_prompt_the_end_is_known_at_once_and_the_beginning_some_steps_later() -> None:
    random = Random(5)
    prompt = [97, 98, 99, 11, *(random.randrange(90) for _ in range(6000)), 95, 96, 22]
    assert found(begun(*prompt, 95, 96), 1) == ("ngram-2", [22])
    assert begun(*prompt, 98, 99).source() is None
    drafter = begun(*prompt)
    for token in range(1000, 1006):
        drafter.saw([token], None)
    drafter.saw([98, 99], None)
    assert found(drafter, 1) == ("ngram-2", [11])


def test_the_whole_of_a_long_prompt_ends_up_in_the_index() -> None:
    random = Random(6)
    prompt = [random.randrange(300) for _ in range(5000)]
    drafter = begun(*prompt)
    for token in range(1000, 1008):  # ids that occur nowhere else
        drafter.saw([token], None)
    ids = [*prompt, *range(1000, 1008)]
    for start in (0, 1, 700, 2500, 4990):
        run = prompt[start : start + 8]
        drafter.saw(run, None)
        ids += run
        assert found(drafter, 4) == searched(ids, 4)


def test_a_new_answer_knows_nothing_of_the_last_one() -> None:
    drafter = begun(1, 2, 3, 1, 2)
    drafter.begin([5, 1, 2])
    assert drafter.source() is None


def test_a_longer_match_is_believed_more() -> None:
    run = list(range(8))
    beliefs = []
    for length in LENGTHS:
        source = begun(*run[-length:], 50, 60, *run[-length:]).source()
        assert source is not None
        assert source.name == f"ngram-{length}"
        beliefs.append(source.belief)
    assert beliefs == sorted(beliefs, reverse=True)


def test_nothing_of_an_answer_is_kept_after_its_end() -> None:
    drafter = NgramDrafter()
    drafter.begin([1, 2, 3, 1, 2])
    assert drafter.source() is not None
    drafter.end()
    assert drafter.source() is None
    assert not drafter._ids
    assert not any(drafter._ends.values())
