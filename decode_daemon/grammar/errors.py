"""Why a grammar is not served."""

import re

_ORIGIN = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: ")  # where in its sources the library raised, which helps no user


class GrammarError(Exception):
    """A request's grammar is not served by this daemon: `code` is stable, the message is a sentence.

    - `GrammarUnsupported`: known before the slot is reserved; vLLM serves the request with another library, or refuses it
    - `GrammarBusy`: not now; also known before the slot is reserved, and another daemon may serve the request
    - `GrammarFailed`: came out later, while it was compiled
    """

    code: str


class GrammarUnsupported(GrammarError):  # noqa: N818 - a refusal, not a fault
    """This daemon cannot serve the grammar."""

    code = "grammar_unsupported"


class GrammarBusy(GrammarError):  # noqa: N818 - as above
    """This daemon has no time for the grammar, or has only started."""

    code = "grammar_busy"


class GrammarFailed(GrammarError):  # noqa: N818 - as above
    """The grammar could not be compiled, or not in time."""

    code = "grammar_failed"


def reason_of(error: BaseException) -> str:
    """Return what a library says, on one line."""
    words = " ".join(_ORIGIN.sub("", str(error)).split())
    return words or type(error).__name__
