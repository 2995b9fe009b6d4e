"""Completions in the form vLLM gives them (entrypoints/openai/completion/serving.py)."""

from gateway.answer import AnswerState, PrefillAnswer, encode, whole_answer
from gateway.chunks import Chunks
from gateway.errors import GatewayError
from gateway.logprobs import CompletionLogprobs
from gateway.plan import Plan
from gateway.sse import EVENT_STREAM
from gateway.tokens import Batch


class CompletionStream:
    """Server-sent events: a chunk for each batch of tokens, usage if asked for, [DONE]."""

    content_type = EVENT_STREAM

    def __init__(self, plan: Plan, prefill: PrefillAnswer, state: AnswerState) -> None:
        self._form = plan.form
        self._state = state
        self._chunks = Chunks(plan, prefill, state)
        self._logprobs = None if plan.sampling.logprobs is None else CompletionLogprobs(state.tokenizer, plan)
        self._prompt_ids = prefill.prompt_token_ids if plan.form.return_token_ids else None  # until the first chunk
        # Only the text differs from chunk to chunk; encoding the rest anew each time would cost more than the text.
        self._plain = plan.sampling.logprobs is None and not plan.form.return_token_ids and not plan.form.continuous_usage
        self._before, self._after = self._chunks.around(
            b'{"index":0,"text":',
            b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}',
        )

    def begin(self) -> bytes:
        """Return nothing: a completion's first chunk has text."""
        return b""

    def write(self, batch: Batch) -> bytes:
        """Return the chunk of a batch of tokens."""
        delta = self._state.feed(batch)
        if self._plain and delta.finish_reason is None:
            return self._before + encode(delta.text) + self._after
        prompt_ids, self._prompt_ids = self._prompt_ids, None
        choice = {
            "index": 0,
            "text": delta.text,
            "logprobs": None if self._logprobs is None else self._logprobs.columns(delta.ids, delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "prompt_token_ids": prompt_ids,
            "token_ids": delta.ids if self._form.return_token_ids else None,
        }
        return self._chunks.chunk(encode(choice))

    def end(self) -> bytes:
        """Return what follows the last token."""
        return self._chunks.end()

    def fail(self, error: GatewayError) -> bytes:
        """Return an error event, which ends the stream."""
        return self._chunks.fail(error)


class CompletionJson:
    """One object: vLLM's own answer to the prefill leg, with all of the answer's tokens in it."""

    content_type = "application/json"

    def __init__(self, plan: Plan, prefill: PrefillAnswer, state: AnswerState) -> None:
        self._form = plan.form
        self._prefill = prefill
        self._state = state
        self._logprobs = None if plan.sampling.logprobs is None else CompletionLogprobs(state.tokenizer, plan)
        self._text: list[str] = []
        self._ids: list[int] = []
        self._columns = None if self._logprobs is None else self._logprobs.columns((), ())

    def add(self, batch: Batch) -> None:
        """Take a batch of tokens."""
        delta = self._state.feed(batch)
        self._text.append(delta.text)
        self._ids += delta.ids
        if self._logprobs is not None and self._columns is not None:
            for name, column in self._logprobs.columns(delta.ids, delta.logprobs).items():
                self._columns[name] += column

    def end(self) -> bytes:
        """Return the object."""
        (choice,) = self._prefill.raw["choices"]
        choice = {
            **choice,
            "text": "".join(self._text),
            "logprobs": self._columns,
            "finish_reason": self._state.finish_reason,
            "stop_reason": self._state.stop_reason,
            "token_ids": self._ids if self._form.return_token_ids else None,
            "prompt_token_ids": self._prefill.prompt_token_ids if self._form.return_token_ids else None,
        }
        return whole_answer(self._prefill, self._state, choice)
