"""Token ids to text: the same for every cut into batches, equal to the tokenizer's own decoding and to vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.plan import Form
from gateway.text import Detokenizer, tail_suffices
from tests.kit.answers import stops_in
from tests.kit.gateway import bpe_tokenizer, end_id, ids_of
from tests.kit.scripts import PROMPT_TAIL, byte_tokenizer, sentencepiece_tokenizer

PROMPT = ids_of("def f(x):\n")
WORDS = ["stop", "STOP", " here", "🙂", "日本", "é", "\n", " ", ".", "a    b", "x", "👩‍👩‍👧‍👦", "Straße", "aab", "aa"]
TEXTS = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(WORDS), max_size=8).map("".join))
VOCABULARY = bpe_tokenizer().get_vocab_size()


@dataclass(frozen=True)
class Told:
    text: str
    stop: str | None
    kept: int


@dataclass(frozen=True)
class Case:
    """Tokens of an answer, `stopped` if the last of them is a stop id, after a prompt."""

    tokenizer: Tokenizer
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    form: Form
    min_tokens: int
    stopped: bool


def ids_in(tokenizer: Tokenizer, most: int, least: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """Mostly tokens that do something: added ones, and pieces of characters and stop strings."""
    added = st.sampled_from(sorted(tokenizer.get_added_tokens_decoder()))
    return st.lists(st.one_of(st.integers(0, tokenizer.get_vocab_size() + 1), added), min_size=least, max_size=most).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokenizer = draw(st.sampled_from([byte_tokenizer(), sentencepiece_tokenizer()]))
    streams = [ids_in(tokenizer, 24)]
    if tokenizer is byte_tokenizer():
        streams.append(TEXTS.map(ids_of).map(tuple))
    ids = draw(st.one_of(streams).filter(bool))
    stops = stops_in(tokenizer.decode(ids, skip_special_tokens=False))
    form = st.builds(
        Form,
        stop=st.lists(stops, max_size=4).map(tuple),
        include_stop=st.booleans(),
        skip_special_tokens=st.booleans(),
        spaces_between_special_tokens=st.booleans(),
    )
    prompt = draw(st.one_of(ids_in(tokenizer, 5), ids_in(tokenizer, 2 * PROMPT_TAIL, PROMPT_TAIL)))
    return Case(tokenizer, prompt, ids, draw(form), draw(st.integers(0, 6)), draw(st.booleans()))


def detokenizer_of(case: Case) -> Detokenizer:
    return Detokenizer(case.tokenizer, case.prompt, case.form, case.min_tokens)


def tell(case: Case, batches: Sequence[Sequence[int]]) -> Told:
    """What the client sees of an answer that comes in these batches."""
    detokenizer, text, kept = detokenizer_of(case), "", 0
    for index, batch in enumerate(batches):
        piece = detokenizer.feed(batch, stopped=case.stopped and index == len(batches) - 1)
        text, kept = text + piece.text, kept + piece.kept
        if piece.stop is not None:
            return Told(text, piece.stop, kept)
    return Told(text + detokenizer.finish(), None, kept)


def vllm_detokenizer(oracle: SimpleNamespace, case: Case) -> Any:
    params: Any = SimpleNamespace(
        stop=list(case.form.stop),
        min_tokens=case.min_tokens,
        include_stop_str_in_output=case.form.include_stop,
        skip_special_tokens=case.form.skip_special_tokens,
        spaces_between_special_tokens=case.form.spaces_between_special_tokens,
    )
    request = SimpleNamespace(sampling_params=params, prompt_token_ids=list(case.prompt), request_id="1")
    return oracle.Detokenizer(SimpleNamespace(_tokenizer=case.tokenizer), request)


def vllm_tells(oracle: SimpleNamespace, case: Case) -> tuple[Told, list[str]]:
    """The same answer from vLLM's detokenizer, token by token, as its output processor drives it, and its pieces."""
    detokenizer, pieces, hit = vllm_detokenizer(oracle, case), [], None
    for index, token in enumerate(case.ids):
        last = index == len(case.ids) - 1
        hit = detokenizer.update([token], last and case.stopped)
        pieces.append(detokenizer.get_next_output_text(last or hit is not None, delta=True))
        if hit is not None:
            break
    return Told("".join(pieces), hit, detokenizer.num_output_tokens()), pieces


@st.composite
def cut_cases(draw: st.DrawFn) -> tuple[Case, list[Sequence[int]]]:
    case = draw(cases())
    at = sorted(draw(st.lists(st.integers(0, len(case.ids) - 1), max_size=5)))
    return case, [case.ids[a:b] for a, b in zip([0, *at], [*at, len(case.ids)], strict=True)]


@settings(derandomize=True, max_examples=400)
@given(cut_cases())
def test_any_cut_into_batches_gives_what_vllm_tells_token_by_token(
    oracle: SimpleNamespace, pieces: tuple[Case, list[Sequence[int]]]
) -> None:
    case, batches = pieces
    expected, _ = vllm_tells(oracle, case)
    assert tell(case, batches) == expected
    assert tell(case, [case.ids]) == expected


@settings(derandomize=True, max_examples=200)
@given(cases())
def test_as_much_is_held_back_as_vllm_holds_back(oracle: SimpleNamespace, case: Case) -> None:
    _, expected = vllm_tells(oracle, case)
    detokenizer = detokenizer_of(case)
    shown = [
        detokenizer.feed([token], stopped=case.stopped and index == len(case.ids) - 1)
        for index, token in enumerate(case.ids[: len(expected)])
    ]
    texts = [piece.text for piece in shown]
    if shown[-1].stop is None:
        texts[-1] += detokenizer.finish()
    assert texts == expected


@settings(derandomize=True, max_examples=400)
@given(cases())
def test_the_prompts_last_ids_prime_as_the_whole_prompt_does_where_they_suffice(oracle: SimpleNamespace, case: Case) -> None:
    tail = case.prompt[-PROMPT_TAIL:]
    if tail_suffices(case.tokenizer, tail, len(case.prompt), skip_special_tokens=case.form.skip_special_tokens):
        assert tell(replace(case, prompt=tail), [case.ids]) == vllm_tells(oracle, case)[0]


@pytest.mark.parametrize("ending", [ids_of("日")[:1], [end_id()] * PROMPT_TAIL])
def test_a_tail_that_ends_inside_a_character_or_has_no_text_does_not_suffice(ending: list[int]) -> None:
    prompt = [*ids_of("The capital of France is" * 8), *ending]
    tail = prompt[-PROMPT_TAIL:]
    assert not tail_suffices(bpe_tokenizer(), tail, len(prompt), skip_special_tokens=True)
    assert tail_suffices(bpe_tokenizer(), tail, len(tail), skip_special_tokens=True), "it is the whole prompt"


@given(TEXTS)
def test_a_whole_text_is_what_the_tokenizer_decodes(text: str) -> None:
    ids = ids_of(text)
    told = read(ids)
    # U+FFFD itself at the very end looks like a character that is not whole yet.
    assert told.text == bpe_tokenizer().decode(ids) == text or text.endswith("\ufffd")
    assert told.kept == len(ids)


@given(st.lists(st.sampled_from(["é", "日", "🙂", "🇫🇷"]), min_size=1).map(lambda words: ids_of("".join(words))))
def test_no_piece_ends_inside_a_character(ids: list[int]) -> None:
    detokenizer = Detokenizer(bpe_tokenizer(), PROMPT, Form())
    shown = [detokenizer.feed([token]).text for token in ids]
    assert not any("\ufffd" in text for text in shown)
    assert "".join(shown) == bpe_tokenizer().decode(ids)


def read(ids: Sequence[int], *stop: str, stopped: bool = False, min_tokens: int = 0, **form: Any) -> Told:
    """An answer in one batch."""
    return tell(Case(bpe_tokenizer(), tuple(PROMPT), tuple(ids), Form(stop=stop, **form), min_tokens, stopped), [ids])


def test_a_stop_string_that_spans_tokens_and_the_first_of_them() -> None:
    ids = ids_of("Stop! Never")
    assert len(ids_of("Stop!")) > 1
    assert read(ids, "Stop!") == Told("", "Stop!", len(ids_of("Stop!")))


def test_of_overlapping_stop_strings_the_one_that_is_complete_first_counts() -> None:
    ids = ids_of("The capital of France is Paris.")
    assert read(ids, "France is", "of F").stop == "of F"
    assert read(ids, "Paris.", "ris", "is.").stop == "ris"


def test_within_one_token_too_the_one_that_is_complete_first_counts() -> None:
    (token,) = [n for n in range(VOCABULARY) if bpe_tokenizer().decode([n]) == " Stop"]
    assert read([token], "op", "to") == Told(" S", "to", 1)
    assert read([token], "top", "op", "t") == Told(" S", "t", 1)
    assert read([token], "op", "top") == Told(" St", "op", 1), "ties go to the request's order"


def test_a_stop_string_that_is_to_be_included_ends_the_text() -> None:
    assert read(ids_of("stop here. Never"), "here", include_stop=True).text == "stop here"


def test_nothing_is_held_back_for_a_stop_string_that_is_to_be_included() -> None:
    detokenizer = Detokenizer(bpe_tokenizer(), PROMPT, Form(stop=("zzzzzzzz",), include_stop=True))
    assert detokenizer.feed(ids_of("abc")).text == "abc"
    assert detokenizer.finish() == ""


def test_a_stop_string_within_the_least_tokens_is_text_like_any_other() -> None:
    ids = ids_of("stop here. stop here. END")
    first, second = len(ids_of("stop here.")), len(ids_of("stop here. stop here."))
    assert read(ids, "here.", min_tokens=first) == Told("stop here. stop ", "here.", second)
    assert read(ids, "here.", min_tokens=first - 1) == Told("stop ", "here.", first)


def test_a_stop_string_that_begins_within_the_least_tokens_counts_where_it_ends() -> None:
    ids = ids_of("stop here. END")
    assert read(ids, "stop here.", min_tokens=1).stop == "stop here."


def test_what_was_held_back_is_released_at_the_end() -> None:
    detokenizer = Detokenizer(bpe_tokenizer(), PROMPT, Form(stop=("zzzzzzzz",)))
    shown = detokenizer.feed(ids_of("abc")).text
    assert shown == ""
    assert detokenizer.finish() == "abc"
    assert detokenizer.finish() == ""


def test_no_more_is_held_back_than_could_begin_a_stop_string() -> None:
    detokenizer = Detokenizer(bpe_tokenizer(), PROMPT, Form(stop=("xyz", "q")))
    assert detokenizer.feed(ids_of("The capital")).text == "The capit"


def test_tokens_after_the_stop_string_are_neither_shown_nor_kept() -> None:
    before, after = ids_of("stop here."), ids_of(" Never shown")
    assert read([*before, *after], "here.") == Told("stop ", "here.", len(before))


def test_the_stop_token_is_kept_and_not_shown() -> None:
    ids = ids_of("Paris.")
    assert read([*ids, end_id()], stopped=True) == Told("Paris.", None, len(ids) + 1)
    assert read([end_id()], stopped=True) == Told("", None, 1)
    (dot,) = ids_of(".")
    assert read([*ids[:-1], dot], stopped=True).text == "Paris", "whatever its text"


def test_what_stops_an_answer_is_shown_where_it_is_to_be_included() -> None:
    ids = ids_of("Paris.")
    assert read(ids, stopped=True, include_stop=True).text == "Paris."
    assert read([*ids, end_id()], stopped=True, include_stop=True).text == "Paris."
    shown = read([*ids, end_id()], stopped=True, include_stop=True, skip_special_tokens=False)
    assert shown.text == "Paris.<end>"


def test_a_special_token_inside_an_answer_is_shown_only_where_it_is_asked_for() -> None:
    ids = [*ids_of("a"), end_id(), *ids_of("b")]
    assert read(ids).text == "ab"
    assert read(ids, skip_special_tokens=False).text == "a<end>b"


@pytest.mark.parametrize("tail", [[], ids_of("日本語")[1:], [end_id()] * 32, ids_of("a    b")])
def test_any_end_of_the_prompt_primes_the_text(tail: list[int]) -> None:
    detokenizer = Detokenizer(bpe_tokenizer(), tail, Form())
    assert detokenizer.feed(ids_of(" world")).text == " world"


def test_an_id_that_the_tokenizer_does_not_have_is_no_text() -> None:
    assert read([*ids_of("a"), VOCABULARY + 7, *ids_of("b")]).text == "ab"
