"""Token ids to text: incremental, never splitting a character, and cut at stop strings wherever they begin or end."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be shown now. `stop` is the stop string that ended the answer, with the tokens it took."""

    text: str
    stop: str | None = None
    tokens: int = 0  # of the ids fed, those up to and including the one that completed the stop string


class Detokenizer:
    """One answer's text.

    Primed with the prompt's last ids, since a tokenizer may treat a text's first token differently. While stop strings are
    watched for, as many characters are held back as could still begin one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(prompt_tail), skip_special_tokens=True)
        self._stop = tuple(stop)
        self._hold = max((len(s) for s in stop), default=1) - 1
        self._tail = ""  # the end of the text so far that has not been shown

    def feed(self, ids: Sequence[int]) -> Piece:
        """Return what the ids add. After a piece with a stop nothing more may be fed."""
        if not self._stop:
            return Piece("".join(self._decode(token) for token in ids), tokens=len(ids))
        shown = ""
        for count, token in enumerate(ids, start=1):
            new = self._decode(token)
            self._tail += new
            match = self._match(len(new))
            if match is not None:
                start, stop = match
                return Piece(shown + self._tail[:start], stop, count)
            keep = len(self._tail) - self._hold
            if keep > 0:
                shown += self._tail[:keep]
                self._tail = self._tail[keep:]
        return Piece(shown, tokens=len(ids))

    def finish(self) -> str:
        """Return what was held back: the answer ended without a stop string."""
        tail, self._tail = self._tail, ""
        return tail

    def _match(self, new: int) -> tuple[int, str] | None:
        """Find the stop string that is complete first among those the last `new` characters complete: its start, and it.

        Ties go to the request's order, as in vLLM (v1/engine/detokenizer.py, check_stop_strings).
        """
        found: tuple[int, str] | None = None
        for stop in self._stop:
            # It may begin up to its own length less one before the new text.
            start = self._tail.find(stop, max(0, len(self._tail) - new - len(stop) + 1))
            if start >= 0 and (found is None or start + len(stop) < found[0] + len(found[1])):
                found = start, stop
        return found

    def _decode(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:
            # tokenizers raises a bare Exception when byte fallbacks make an invalid prefix; vLLM restarts the stream too.
            if "Invalid prefix" not in str(error):
                raise
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token) or ""
