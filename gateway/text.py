"""Token ids to text: incremental, never splitting a character, and cut at stop strings wherever they begin or end."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from gateway.plan import Form

REPLACEMENT = "\ufffd"  # what a tokenizer decodes the bytes of an unfinished character to


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be shown now, and how many of the ids fed the answer keeps.

    `stop` is the stop string that ended the answer: ids after the one that completed it are not the answer's.
    """

    text: str
    kept: int
    stop: str | None = None


class Detokenizer:
    """One answer's text, as vLLM shows it (v1/engine/detokenizer.py) when it decodes one token at a time.

    Primed with the prompt's last ids, since a tokenizer may treat a text's first token differently. While stop strings are
    watched for, as many characters are held back as could still begin one, unless they are to be shown anyway.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], form: Form, min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._skip_special = form.skip_special_tokens
        self._stream = DecodeStream(ids=list(prompt_tail), skip_special_tokens=self._skip_special)
        self._added = {} if form.skip_special_tokens or form.spaces_between_special_tokens else _added_tokens(tokenizer)
        self._after_added = False
        self._stop = form.stop
        self._include_stop = form.include_stop
        self._min_tokens = min_tokens  # a stop string counts only where it ends in a later token
        self._overlap = max(map(len, form.stop), default=1) - 1  # characters of a stop string that may lie in earlier tokens
        self._tail = ""  # the text's last characters, so many; not shown yet unless stop strings are included
        self._tokens = 0

    def feed(self, ids: Sequence[int], *, stopped: bool = False) -> Piece:
        """Return what the ids add, `stopped` if the last one is a stop id. After a piece with a stop nothing may be fed."""
        # A stop id's text is left out, unless the answer is to include what stopped it.
        texts = ids[:-1] if stopped and not self._include_stop else ids
        if not self._stop:
            return Piece("".join([self._decode(token) for token in texts]), len(ids))
        shown = ""
        for count, token in enumerate(texts, start=1):
            piece, stop = self._watch(self._decode(token))
            shown += piece
            if stop is not None:
                return Piece(shown, count, stop)
        return Piece(shown, len(ids))

    def finish(self) -> str:
        """Return what was held back: the answer ended without a stop string."""
        tail, self._tail = self._tail, ""
        return "" if self._include_stop else tail

    def _watch(self, new: str) -> tuple[str, str | None]:
        """Return what may be shown after a token's text, and the stop string that it completed."""
        self._tokens += 1
        text = self._tail + new
        match = self._match(text, len(new)) if self._tokens > self._min_tokens else None
        kept = max(0, len(text) - self._overlap)
        before, self._tail = len(self._tail), text[kept:]
        if match is None:
            return (new if self._include_stop else text[:kept]), None
        start, stop = match
        return (text[before : start + len(stop)] if self._include_stop else text[:start]), stop

    def _match(self, text: str, new: int) -> tuple[int, str] | None:
        """Find the stop string that is complete first among those the last `new` characters complete: its start, and it.

        Ties go to the request's order, as in vLLM (v1/engine/detokenizer.py, check_stop_strings).
        """
        found: tuple[int, str] | None = None
        for stop in self._stop if new else ():
            # It may begin up to its own length less one before the new text.
            start = text.find(stop, max(0, len(text) - new - len(stop) + 1))
            if start >= 0 and (found is None or start + len(stop) < found[0] + len(found[1])):
                found = start, stop
        return found

    def _decode(self, token: int) -> str:
        text = self._step(token)
        if not self._added:
            return text
        # No space between two added tokens that follow each other: only those are written as they are in the vocabulary.
        content = self._added.get(token)
        after_added, self._after_added = self._after_added, content is not None
        return content if content is not None and after_added else text

    def _step(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:
            # tokenizers raises a bare Exception when byte fallbacks make an invalid prefix; vLLM restarts the stream too.
            if "Invalid prefix" not in str(error):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            return self._stream.step(self._tokenizer, token) or ""


def tail_suffices(tokenizer: Tokenizer, tail: Sequence[int], prompt_tokens: int, *, skip_special_tokens: bool) -> bool:
    """Tell whether a prompt's last ids prime a Detokenizer as all `prompt_tokens` of them would.

    They do not where they end inside a character or have no text at all: the stream then looks further back.
    """
    if len(tail) >= prompt_tokens:
        return True
    text = tokenizer.decode(list(tail), skip_special_tokens=skip_special_tokens)
    return bool(text) and not text.endswith(REPLACEMENT)


def _added_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    return {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
