"""Chat completions in the form vLLM gives them (entrypoints/openai/chat_completion/serving.py) where it parses nothing."""

from typing import Any

from gateway.answer import AnswerState, Delta, PrefillAnswer, encode, whole_answer
from gateway.chunks import Chunks
from gateway.errors import GatewayError
from gateway.logprobs import ChatLogprobs
from gateway.plan import Plan
from gateway.sse import EVENT_STREAM
from gateway.tokens import Batch


class ChatChunks(Chunks):
    """Writes the chunks of one chat."""

    kind = "chat.completion.chunk"

    def role(self) -> bytes:
        """Return the first chunk: the role, no text, and the prompt where it is asked for."""
        delta = encode({"role": self._prefill.role, "content": ""})
        choice = b'{"index":0,"delta":' + delta + b',"logprobs":null,"finish_reason":null}'
        ids = self._prefill.prompt_token_ids if self._plan.form.return_token_ids else None
        return self._chunk(choice, 0, {"prompt_token_ids": ids, "prompt_text": self._prefill.prompt_text})

    def usage(self, tokens: int) -> dict[str, Any]:
        """Return usage as far as vLLM tells it while the answer grows."""
        return super().usage(tokens) | self._state.reasoning_usage()


class ChatChoices:
    """Writes what is told of tokens beside the message: logprobs and ids where they are asked for, and the end."""

    def __init__(self, plan: Plan, state: AnswerState) -> None:
        self._logprobs = None if plan.sampling.logprobs is None else ChatLogprobs(state.tokenizer, plan)
        self._token_ids = plan.form.return_token_ids

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """Return the logprobs of a delta's tokens; to be asked once for each delta, in the answer's order."""
        return None if self._logprobs is None else {"content": self._logprobs.content(delta.ids, delta.logprobs)}

    def choice(self, message: bytes, delta: Delta) -> bytes:
        """Return a chunk's choice around its part of the message, which is JSON; once for each delta."""
        rest: dict[str, Any] = {"logprobs": self.logprobs(delta), "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            rest["stop_reason"] = delta.stop_reason
        rest["token_ids"] = delta.ids if self._token_ids else None
        return b'{"index":0,"delta":' + message + b"," + encode(rest)[1:]


class ChatStream:
    """Server-sent events: a chunk with the role, one for each batch of tokens, usage if asked for, [DONE]."""

    content_type = EVENT_STREAM

    def __init__(self, plan: Plan, prefill: PrefillAnswer, state: AnswerState) -> None:
        self._state = state
        self._chunks = ChatChunks(plan, prefill, state)
        self._choices = ChatChoices(plan, state)
        # Only the text differs from chunk to chunk; encoding the rest anew each time would cost more than the text.
        self._bare = plan.sampling.logprobs is None and not plan.form.return_token_ids
        self._plain = self._bare and not plan.form.continuous_usage
        self._terse = plan.form.terse
        self._before, self._after = self._chunks.around(
            b'{"index":0,"delta":{"content":', b'},"logprobs":null,"finish_reason":null,"token_ids":null}'
        )

    def begin(self) -> bytes:
        """Return the chunk with the role."""
        return self._chunks.role()

    def write(self, batch: Batch) -> bytes:
        """Return the chunk of a batch of tokens; nothing where vLLM would send none."""
        delta = self._state.feed(batch)
        if self._terse and not delta.text:
            told = delta.finish_reason is not None or not self._bare
            return self._chunks.chunk(self._choices.choice(b"{}", delta)) if told else b""
        text = encode(delta.text)
        if self._plain and delta.finish_reason is None:
            return self._before + text + self._after
        return self._chunks.chunk(self._choices.choice(b'{"content":' + text + b"}", delta))

    def end(self) -> bytes:
        """Return what follows the last token."""
        return self._chunks.end()

    def fail(self, error: GatewayError) -> bytes:
        """Return an error event, which ends the stream."""
        return self._chunks.fail(error)


class ChatJson:
    """One object: vLLM's own answer to the prefill leg, with all of the answer's tokens in it."""

    content_type = "application/json"

    def __init__(self, plan: Plan, prefill: PrefillAnswer, state: AnswerState) -> None:
        self._form = plan.form
        self._prefill = prefill
        self._state = state
        self._choices = ChatChoices(plan, state)
        self._text: list[str] = []
        self._ids: list[int] = []
        self._content: list[dict[str, Any]] | None = None if plan.sampling.logprobs is None else []

    def add(self, batch: Batch) -> None:
        """Take a batch of tokens."""
        delta = self._state.feed(batch)
        self._text.append(delta.text)
        self._ids += delta.ids
        logprobs = self._choices.logprobs(delta)
        if self._content is not None and logprobs is not None:
            self._content += logprobs["content"]

    def end(self) -> bytes:
        """Return the object."""
        (choice,) = self._prefill.raw["choices"]
        choice = {
            **choice,
            "message": {**choice["message"], "content": "".join(self._text)},
            "logprobs": None if self._content is None else {"content": self._content},
            "finish_reason": self._state.finish_reason,
            "stop_reason": self._state.stop_reason,
            "token_ids": self._ids if self._form.return_token_ids else None,
        }
        prompt_ids = self._prefill.prompt_token_ids if self._form.return_token_ids else None
        return whole_answer(self._prefill, self._state, choice, prompt_token_ids=prompt_ids)
