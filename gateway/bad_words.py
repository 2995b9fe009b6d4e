"""Bad words as token ids, made of them as vLLM makes them (SamplingParams.update_from_tokenizer)."""

from collections.abc import Sequence

from tokenizers import Tokenizer

_MOST_SEQUENCES = 128  # vLLM's own limit (VLLM_MAX_NUM_BAD_WORDS): it answers more of them with 400
_MOST_TOKENS = 1024  # in all of them (VLLM_MAX_BAD_WORDS_TOTAL_TOKENS)
_MOST_CHARACTERS = 1 << 14  # tokenizing more would stall everybody's tokens
_TOO_MANY = f"bad_words of more than {_MOST_SEQUENCES} sequences or {_MOST_TOKENS} tokens"


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of ids that `words` stand for: each word alone, and behind a space where that is another token.

    Raises ValueError when vLLM would not take these words, or a request's share of the event loop is too small for them.
    """
    if sum(map(len, words)) > _MOST_CHARACTERS:
        raise ValueError(f"bad_words of more than {_MOST_CHARACTERS} characters")
    if words and (tokenizer.truncation is not None or tokenizer.padding is not None):
        raise ValueError("bad_words with a tokenizer that truncates or pads")  # vLLM's does neither
    distinct = dict.fromkeys(words)
    if len(distinct) > _MOST_SEQUENCES:  # each has one at least: not worth tokenizing
        raise ValueError(_TOO_MANY)
    found: list[tuple[int, ...]] = []
    for word in distinct:
        bare = word.lstrip()
        alone = _ids(tokenizer, bare)
        if not alone:
            raise ValueError(f"bad word {word!r} has no tokens")
        found.append(alone)
        behind_space = _ids(tokenizer, f" {bare}")
        # Of a sequence that begins alike or has another length, vLLM takes the one without the space to cover both.
        if len(behind_space) == len(alone) and behind_space[0] != alone[0]:
            found.append(behind_space)
    if len(found) > _MOST_SEQUENCES or sum(map(len, found)) > _MOST_TOKENS:
        raise ValueError(_TOO_MANY)
    return tuple(found)


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    except Exception as error:  # tokenizers raises no narrower one
        raise ValueError(f"bad word {text!r} cannot be tokenized: {error}") from error
