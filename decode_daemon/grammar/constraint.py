"""A grammar's state along one answer: which ids may come next."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from decode_daemon.engine.protocol import EngineError

if TYPE_CHECKING:
    from xgrammar import GrammarMatcher


class GrammarConstraint:
    """A `Constraint`: an xgrammar matcher over a vocabulary of `vocab_size` ids.

    Once the answer matches as a whole and an ending id has come, nothing is constrained any more, as in vLLM: a request that
    ignores the end goes on freely.
    """

    def __init__(self, matcher: "GrammarMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words = torch.empty(1, -(-vocab_size // 32), dtype=torch.int32)  # one bit an id, lowest first
        self._over = False

    def mask(self) -> torch.Tensor | None:
        """Return which ids may come next, bool [vocab], the caller's to keep; None when every id may."""
        if self._over or not self._matcher.fill_next_token_bitmask(self._words):
            return None
        bits = np.unpackbits(self._words.numpy().view(np.uint8), bitorder="little", count=self._vocab_size)
        return torch.from_numpy(bits.view(np.bool_))

    def accept(self, token: int) -> None:
        """Advance; raises EngineError for a token that may not come here."""
        if self._over:
            return
        if not self._matcher.accept_token(token):
            raise EngineError(f"the grammar has no place for token {token} here: the two legs do not match the same grammar")
        self._over = self._matcher.is_terminated()
