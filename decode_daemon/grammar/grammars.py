"""A daemon's grammars: parsed before a slot is reserved, compiled while prefill runs, cached for the next request.

Parsing and compiling are native code that releases the interpreter. Neither happens on the event loop.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog

from decode_daemon.grammar.constraint import GrammarConstraint
from decode_daemon.grammar.errors import GrammarBusy, GrammarError, GrammarFailed, GrammarUnsupported, reason_of
from decode_daemon.grammar.form import Form
from decode_daemon.grammar.threads import Threads
from decode_daemon.grammar.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler

log = structlog.get_logger(__name__)

T = TypeVar("T")

_PARSE_S = 0.5  # a gateway waits a second for its slot to be reserved
_AT_ONCE = 4  # grammars that are parsed or compiled at the same time; more are left to vLLM


class Grammars:
    """Grammars over one model's vocabulary."""

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        *,
        cache_bytes: int,
        wait_s: float,
        compiled: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`cache_bytes` bounds what is kept of compiled grammars; `compiled` is told, in a thread, how long one took.

        `wait_s` is for who awaits `constraint`: so long may an answer that could go on wait for its grammar.
        """
        self.wait_s = wait_s
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._cache_bytes = cache_bytes
        self._compiled = compiled
        self._threads = Threads(_AT_ONCE, "grammar")
        self._compiler: Future[GrammarCompiler | str] | None = None
        self._compiling: dict[Form, Future[CompiledGrammar]] = {}

    def start(self) -> None:
        """Begin to read the model's vocabulary, which takes seconds; until then grammars are refused."""
        self._compiler = Threads(1, "vocabulary").run(self._load)

    async def ready(self) -> "GrammarCompiler":
        """Return what compiles, once the vocabulary is there.

        Raises GrammarUnsupported when it cannot be read, and GrammarBusy before it is begun.
        """
        if self._compiler is None:
            raise GrammarBusy("this daemon has not begun to read its model's vocabulary")
        compiler = await asyncio.wrap_future(self._compiler)
        if isinstance(compiler, str):
            raise GrammarUnsupported(compiler)
        return compiler

    async def check(self, form: Form) -> None:
        """Raise GrammarUnsupported for what this daemon does not serve, GrammarBusy where it cannot tell in half a second."""
        try:
            async with asyncio.timeout(_PARSE_S):
                await self.ready()
                await asyncio.wrap_future(self._begin(form.parse))
        except TimeoutError:
            raise GrammarBusy(
                f"this daemon was not done with the grammar in {_PARSE_S:g} s: it is very large, or the daemon has only started"
            ) from None

    async def constraint(self, form: Form, ending: Iterable[int]) -> GrammarConstraint:
        """Return the constraint of an answer that begins, and may end with one of the ids `ending` where it matches.

        Expects a form that `check` has nothing against. Takes as long as it takes: to stop waiting does not stop the work,
        and who asks for the same form again gets its result. Raises GrammarFailed.
        """
        try:
            compiled = await asyncio.wrap_future(self._compile(form, await self.ready()))
            return self._begun(compiled, ending)
        except GrammarError as error:
            raise GrammarFailed(str(error)) from error
        except Exception as error:
            log.warning("grammar failed", kind=form.kind, error=reason_of(error))
            raise GrammarFailed(f"the grammar cannot be compiled: {reason_of(error)}") from error

    def _compile(self, form: Form, compiler: "GrammarCompiler") -> "Future[CompiledGrammar]":
        def timed() -> "CompiledGrammar":
            began = time.perf_counter()
            compiled = form.compile(compiler)
            self._compiled(time.perf_counter() - began)
            return compiled

        running = self._compiling.get(form)
        if running is None:
            running = self._compiling[form] = self._begin(timed)
            running.add_done_callback(lambda _: self._compiling.pop(form, None))
        return running

    def _begun(self, compiled: "CompiledGrammar", ending: Iterable[int]) -> GrammarConstraint:
        from xgrammar import GrammarMatcher

        # A model's own stop ids may lie outside of its logits, where none is ever chosen.
        stops = sorted(token for token in ending if token < self._vocab_size)
        return GrammarConstraint(GrammarMatcher(compiled, override_stop_tokens=stops or None), self._vocab_size)

    def _begin(self, work: Callable[[], T]) -> "Future[T]":
        future = self._threads.run(work)
        if future is None:
            raise GrammarBusy(f"this daemon is at work on {_AT_ONCE} grammars: no more are taken meanwhile")
        return future

    def _load(self) -> "GrammarCompiler | str":
        """Return a compiler, or why there is none: an error would keep the frames of everybody it is raised for.

        Clients are told why: nothing of this machine, whose paths a library's own words may hold.
        """
        try:
            from xgrammar import GrammarCompiler

            vocabulary = read_vocabulary(self._model_dir, self._vocab_size)
            threads = max(1, min(8, (os.cpu_count() or 1) // 2))
            return GrammarCompiler(vocabulary, max_threads=threads, cache_enabled=True, cache_limit_bytes=self._cache_bytes)
        except GrammarUnsupported as error:
            self._log_unread(error)
            return str(error)
        except Exception as error:  # noqa: BLE001 - of transformers and xgrammar, which raise anything
            self._log_unread(error)
            return "the model's tokenizer cannot be read for grammars; the daemon's log says why"

    def _log_unread(self, error: Exception) -> None:
        log.warning(
            "structured output is left to vLLM: the tokenizer cannot be read",
            model_dir=str(self._model_dir),
            error=reason_of(error),
        )
