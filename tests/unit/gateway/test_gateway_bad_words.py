"""Bad words become the token ids that vLLM makes of them."""

import itertools
import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gateway.bad_words import bad_word_ids
from tests.kit.gateway import bpe_tokenizer

_TEXTS = ["the cat sat on the mat", "a dog, a Dog and the Cat", "breathe the ether then", "bad words and worse words"] * 8


@cache
def metaspace() -> Tokenizer:
    """A unigram tokenizer in SentencePiece's manner: a word is another token behind a space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(vocab_size=90, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


@cache
def letters() -> Tokenizer:
    """Knows six letters and the space: anything else has no tokens at all."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: token for token, letter in enumerate("abcthe ")}, merges=[]))
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": bpe_tokenizer,
    "metaspace": metaspace,
    "letters": letters,
}


@cache
def vllms(kind: str) -> Any:
    """The same tokenizer, as vLLM has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast
        from vllm.tokenizers.hf import get_cached_tokenizer

        return get_cached_tokenizer(PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[kind]()))


def vllms_ids(words: list[str], kind: str) -> tuple[tuple[int, ...], ...] | None:
    """What vLLM makes of the words; None where it refuses them."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    try:
        params = SamplingParams(bad_words=words)
        params.update_from_tokenizer(vllms(kind))
    except VLLMValidationError:
        return None
    return tuple(map(tuple, params.bad_words_token_ids or ()))


def our_ids(words: list[str], kind: str) -> tuple[tuple[int, ...], ...] | None:
    try:
        return bad_word_ids(words, TOKENIZERS[kind]())
    except ValueError:
        return None


WORDS = st.one_of(
    st.sampled_from(["the", " the", "cat", "Cat", "bad words", "  a", "é", "ﬁ", "<end>", "\n", "\u00a0", "日本", "xyz"]),
    st.text(min_size=1, max_size=6),
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(deadline=None)
@given(words=st.lists(WORDS, max_size=5))
@example(words=[" "])
@example(words=["cat", " cat", "cat"])
def test_words_have_the_ids_that_vllm_gives_them(kind: str, words: list[str]) -> None:
    assert our_ids(words, kind) == vllms_ids(words, kind)


def test_a_word_that_is_another_token_behind_a_space_is_bad_both_ways() -> None:
    alone, behind_space = bad_word_ids(["the"], metaspace())
    assert (len(alone), len(behind_space)) == (1, 1)
    assert alone != behind_space


@pytest.mark.parametrize("count", [128, 129])
def test_as_many_sequences_are_taken_as_vllm_takes(count: int) -> None:
    words = ["".join(letters) for letters in itertools.islice(itertools.product("abcthe", repeat=3), count)]
    ours = our_ids(words, "letters")
    assert ours == vllms_ids(words, "letters")
    assert (ours is None) == (count == 129)


def test_words_longer_than_vllms_buffer_are_refused_with_what_is_wrong() -> None:
    for words in (["é" * 600], ["a" * (1 << 14 | 1)]):
        with pytest.raises(ValueError, match=re.escape("bad_words of more than")):
            bad_word_ids(words, bpe_tokenizer())


def test_more_words_than_sequences_are_refused_before_any_is_tokenized() -> None:
    without_tokens = [chr(ord("A") + number) * 3 + "\u3042" for number in range(129)]
    with pytest.raises(ValueError, match="has no tokens"):
        bad_word_ids(without_tokens[:128], letters())
    with pytest.raises(ValueError, match="more than 128 sequences"):
        bad_word_ids(without_tokens, letters())
    assert bad_word_ids(["cat"] * 129, letters()) == bad_word_ids(["cat"], letters())


def test_a_tokenizer_that_pads_or_truncates_is_not_vllms() -> None:
    tokenizer = Tokenizer.from_str(bpe_tokenizer().to_str())
    tokenizer.enable_truncation(1)
    with pytest.raises(ValueError, match="truncates"):
        bad_word_ids(["a cat"], tokenizer)
    assert bad_word_ids([], tokenizer) == ()
