"""Structured output: which ids may follow an answer so far, by xgrammar, the library vLLM itself uses.

What vLLM's backend "auto" gives to xgrammar is served as vLLM serves it; what it gives to another library is refused, because
both legs of a request must choose from the same ids.
"""

from decode_daemon.grammar.errors import GrammarBusy, GrammarError, GrammarFailed, GrammarUnsupported
from decode_daemon.grammar.form import Form
from decode_daemon.grammar.grammars import Grammars

__all__ = ["Form", "GrammarBusy", "GrammarError", "GrammarFailed", "GrammarUnsupported", "Grammars"]
