"""Token ids to text: the same for every cut into batches, equal to the tokenizer's own decoding and to vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.reply import AnswerState
from gateway.text import Detokenizer
from tests.kit.gateway import bpe_tokenizer, end_id, ids_of

PROMPT = ids_of("def f(x):\n")
WORDS = ["stop", "STOP", " here", "🙂", "日本", "é", "\n", " ", ".", "a    b", "x", "👩‍👩‍👧‍👦", "Straße", "aab", "aa"]
TEXTS = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(WORDS), max_size=8).map("".join))
VOCABULARY = bpe_tokenizer().get_vocab_size()
ANY_IDS = st.lists(st.integers(0, VOCABULARY - 1), max_size=24)
STREAMS = st.one_of(TEXTS.map(ids_of), ANY_IDS)
STOPS = st.lists(
    st.one_of(
        st.sampled_from(["aab", "ab", "b", "op", "stop", ". ", "🙂", "本", "\n", "p h", "é"]), st.text(min_size=1, max_size=3)
    ),
    max_size=4,
)


@dataclass(frozen=True)
class Told:
    text: str
    finish: str | None
    stop: str | None
    tokens: int


def tell(batches: Sequence[Sequence[int]], stop: Sequence[str] = (), finish: str | None = "length") -> Told:
    """An answer in batches, the last of which comes with `finish`."""
    state = AnswerState(Detokenizer(bpe_tokenizer(), PROMPT, stop))
    text = ""
    for index, batch in enumerate(batches):
        text += state.feed(batch, finish if index == len(batches) - 1 else None)
        if state.finish_reason is not None:
            break
    return Told(text, state.finish_reason, state.stop_reason, state.tokens)


@st.composite
def cut(draw: st.DrawFn, streams: st.SearchStrategy[list[int]]) -> tuple[list[int], list[list[int]]]:
    ids = draw(streams)
    at = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    return ids, [ids[a:b] for a, b in zip([0, *at], [*at, len(ids)], strict=True)]


@given(cut(STREAMS), STOPS)
def test_any_cut_into_batches_gives_the_same_answer(pieces: tuple[list[int], list[list[int]]], stop: list[str]) -> None:
    ids, batches = pieces
    assert tell(batches, stop) == tell([ids], stop) == tell([[token] for token in ids] or [[]], stop)


@given(TEXTS)
def test_a_whole_text_is_what_the_tokenizer_decodes(text: str) -> None:
    ids = ids_of(text)
    told = tell([ids])
    # U+FFFD itself at the very end looks like a character that is not whole yet.
    assert told.text == bpe_tokenizer().decode(ids) == text or text.endswith("\ufffd")
    assert told.tokens == len(ids)


@given(cut(st.lists(st.sampled_from(["é", "日", "🙂", "🇫🇷"]), min_size=1).map(lambda words: ids_of("".join(words)))))
def test_no_piece_ends_inside_a_character(pieces: tuple[list[int], list[list[int]]]) -> None:
    detokenizer = Detokenizer(bpe_tokenizer(), PROMPT, ())
    shown = [detokenizer.feed(batch).text for batch in pieces[1]]
    assert not any("\ufffd" in text for text in shown)
    assert "".join(shown) == bpe_tokenizer().decode(pieces[0])


def vllm_tells(oracle: SimpleNamespace, ids: Sequence[int], stop: Sequence[str], finish: str | None) -> Told:
    """The same answer from vLLM's detokenizer, token by token, as its output processor drives it."""
    params: Any = SimpleNamespace(
        stop=list(stop),
        min_tokens=0,
        include_stop_str_in_output=False,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
    )
    request = SimpleNamespace(sampling_params=params, prompt_token_ids=PROMPT, request_id="1")
    detokenizer = oracle.Detokenizer(SimpleNamespace(_tokenizer=bpe_tokenizer()), request)
    text, reason, hit = "", None, None
    for index, token in enumerate(ids):
        reason = finish if index == len(ids) - 1 else None
        hit = detokenizer.update([token], reason == "stop")
        reason = "stop" if hit is not None else reason
        text += detokenizer.get_next_output_text(reason is not None, delta=True)
        if reason is not None:
            break
    return Told(text, reason, hit, detokenizer.num_output_tokens())


@given(ids=STREAMS.filter(bool), stop=STOPS, finish=st.sampled_from(["length", "stop"]))
def test_text_stop_reason_and_count_are_vllms(oracle: SimpleNamespace, ids: list[int], stop: list[str], finish: str) -> None:
    fed = [*ids, end_id()] if finish == "stop" else ids
    assert tell([[token] for token in fed], stop, finish) == vllm_tells(oracle, fed, stop, finish)
    assert tell([fed], stop, finish) == vllm_tells(oracle, fed, stop, finish)


def test_a_stop_string_that_spans_tokens_and_the_first_of_them() -> None:
    ids = ids_of("Stop! Never")
    assert len(ids_of("Stop!")) > 1
    assert tell([[token] for token in ids], ["Stop!"]) == Told("", "stop", "Stop!", len(ids_of("Stop!")))


def test_of_overlapping_stop_strings_the_one_that_is_complete_first_counts() -> None:
    ids = ids_of("The capital of France is Paris.")
    assert tell([ids], ["France is", "of F"]).stop == "of F"
    assert tell([ids], ["Paris.", "ris", "is."]).stop == "ris"


def test_within_one_token_too_the_one_that_is_complete_first_counts() -> None:
    (token,) = [n for n in range(VOCABULARY) if bpe_tokenizer().decode([n]) == " Stop"]
    assert tell([[token]], ["op", "to"]) == Told(" S", "stop", "to", 1)
    assert tell([[token]], ["top", "op", "t"]) == Told(" S", "stop", "t", 1)
    assert tell([[token]], ["op", "top"]) == Told(" St", "stop", "op", 1), "ties go to the request's order"


@pytest.mark.parametrize(("limit", "expected"), [(-1, ("length", None)), (0, ("stop", "here")), (1, ("stop", "here"))])
def test_a_stop_string_at_the_limit_wins_over_the_limit(limit: int, expected: tuple[str, str | None]) -> None:
    upto = len(ids_of("stop here"))
    told = tell([[token] for token in ids_of("stop here. END")[: upto + limit]], ["here"])
    assert (told.finish, told.stop) == expected
    assert told.text == ("stop " if expected[1] else bpe_tokenizer().decode(ids_of("stop here")[: upto - 1]))


def test_what_was_held_back_is_released_at_the_end() -> None:
    detokenizer = Detokenizer(bpe_tokenizer(), PROMPT, ["zzzzzzzz"])
    shown = detokenizer.feed(ids_of("abc")).text
    assert shown == ""
    assert detokenizer.finish() == "abc"
    assert detokenizer.finish() == ""


def test_no_more_is_held_back_than_could_begin_a_stop_string() -> None:
    detokenizer = Detokenizer(bpe_tokenizer(), PROMPT, ["xyz", "q"])
    assert detokenizer.feed(ids_of("The capital")).text == "The capit"


def test_tokens_after_the_stop_string_are_neither_shown_nor_counted() -> None:
    before, after = ids_of("stop here."), ids_of(" Never shown")
    assert tell([[*before, *after]], ["here."]) == Told("stop ", "stop", "here.", len(before))


def test_the_stop_token_is_counted_and_not_shown() -> None:
    ids = ids_of("Paris.")
    assert tell([ids, [end_id()]], finish="stop") == Told("Paris.", "stop", None, len(ids) + 1)
    assert tell([[end_id()]], finish="stop") == Told("", "stop", None, 1)


def test_a_special_token_inside_an_answer_is_not_shown() -> None:
    assert tell([[*ids_of("a"), end_id(), *ids_of("b")]]).text == "ab"


@pytest.mark.parametrize("tail", [[], ids_of("日本語")[1:], [end_id()] * 32, ids_of("a    b")])
def test_any_end_of_the_prompt_primes_the_text(tail: list[int]) -> None:
    detokenizer = Detokenizer(bpe_tokenizer(), tail, ())
    assert detokenizer.feed(ids_of(" world")).text == " world"


def test_an_id_that_the_tokenizer_does_not_have_is_no_text() -> None:
    assert tell([[*ids_of("a"), VOCABULARY + 7, *ids_of("b")]]).text == "ab"
