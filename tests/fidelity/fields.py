"""Cases of the fields that both endpoints have: at least one for each, and for each value that means something else."""

from tests.fidelity.case import ABSENT, COLOURS, Case, Fields, Path, brief, chat, spread, text

ENDOFTEXT, END = 0, 2  # special tokens of SmolLM2; END is its eos
DOT, NEWLINE = 30, 198
PARIS = 7042  # " Paris"
OF = 282  # " of"
FEW = [28, 30, 33, 34, 198, 253, 260, 282, 284, 314, 504, 3575, 4649, 7042]  # some ids, of common words and punctuation
FIRST_BYTE_OF_AN_EMOJI = 10813

# How a greedy answer can be had without `temperature: 0`.
_CHOOSING: dict[str, Fields] = {
    "temperature 0.0": {"temperature": 0.0},
    "temperature 1e-6, which vLLM raises": {"temperature": 1e-6, "top_k": 1},
    "top_k 1": {"temperature": 1.0, "top_k": 1, "again": True},
    "temperature null": {"temperature": None, "top_k": 1},
    "temperature absent": {"temperature": ABSENT, "top_k": 1},
    "temperature 2": {"temperature": 2, "top_k": 1},
    "top_p so small that one token is left": {"temperature": 0.7, "top_p": 1e-6},
    "min_p 1": {"temperature": 0.7, "min_p": 1.0, "again": True},
    "min_p without effect": {"min_p": 0.3, "max_tokens": 3},
    "top_k -1, top_p 1": {"top_k": -1, "top_p": 1, "max_tokens": 3},
    "top_k 0": {"top_k": 0, "max_tokens": 3},
    "a seed without effect": {"seed": 7, "max_tokens": 3},
    "seed -1": {"seed": -1, "max_tokens": 3},
}

_PENALTIES: dict[str, Fields] = {
    "presence penalty": {"presence_penalty": 1.5, "max_tokens": 16},
    "negative presence penalty": {"presence_penalty": -1.0},
    "frequency penalty": {"frequency_penalty": 1.2, "max_tokens": 16},
    "repetition penalty": {"repetition_penalty": 1.3, "max_tokens": 16, "again": True},
    "repetition penalty below 1": {"repetition_penalty": 0.8},
    "all penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "max_tokens": 16,
        "again": True,
    },
    "all penalties, with a mask": {
        "presence_penalty": 0.6,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.2,
        "allowed_token_ids": FEW,
        "max_tokens": 16,
    },
}

_MASKS: dict[str, Fields] = {
    "logit_bias that bans": {"logit_bias": {str(PARIS): -100, "504": -100}},
    "logit_bias that pushes, beyond its limit": {"logit_bias": {str(PARIS): 500.5}, "max_tokens": 4},
    "logit_bias of a little": {"logit_bias": {"260": 2.5, "253": 1}, "again": True},
    "logit_bias empty": {"logit_bias": {}, "max_tokens": 3},
    "logit_bias of the eos": {"logit_bias": {str(END): 100}},
    "allowed_token_ids": {"allowed_token_ids": FEW, "again": True},
    "allowed_token_ids, one": {"allowed_token_ids": [PARIS], "max_tokens": 4},
    "allowed_token_ids, one that ends the answer": {"allowed_token_ids": [END]},
    "allowed_token_ids, half a character": {"allowed_token_ids": [FIRST_BYTE_OF_AN_EMOJI], "max_tokens": 4},
    "bad_words": {"bad_words": ["Paris", "capital", "small"], "again": True},
    "bad_words of several tokens": {"bad_words": ["The capital of", "town nestled", "  of France"]},
    "bad_words empty": {"bad_words": [], "max_tokens": 3},
}

_ENDINGS: dict[str, Fields] = {
    "stop": {"stop": ["."], "max_tokens": 24},
    "stop as a string": {"stop": " of"},
    "stop within the first token": {"stop": ["h", "i"]},
    "stop across tokens": {"stop": ["of Fra", "n nest"], "max_tokens": 20},
    "stop across tokens, shown": {"stop": ["of Fra", "n nest"], "include_stop_str_in_output": True, "max_tokens": 20},
    "stop shown": {"stop": [" capital", " little", " small"], "include_stop_str_in_output": True, "again": True},
    "stop that never comes": {"stop": ["zzzzzzzz"]},
    "four stops": {"stop": ["zzz", "qqq", "\n\n", " is"]},
    "stop empty": {"stop": [], "max_tokens": 3},
    "stop null": {"stop": None, "max_tokens": 3},
    "stop with unicode": {"stop": ["日本", "é", "."], "max_tokens": 20},
    "stop_token_ids": {"stop_token_ids": [PARIS, 1838, OF], "again": True},
    "stop_token_ids shown": {"stop_token_ids": [PARIS, 1838, OF], "include_stop_str_in_output": True},
    "stop_token_ids, the eos": {"stop_token_ids": [END], "max_tokens": 24},
    "stop_token_ids, the eos, ignored": {"stop_token_ids": [END], "ignore_eos": True, "max_tokens": 24},
    "stop_token_ids null": {"stop_token_ids": None, "max_tokens": 3},
    "include_stop_str_in_output alone": {"include_stop_str_in_output": True, "max_tokens": 12},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 16, "again": True},
    "ignore_eos, specials shown": {"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 16},
    "min_tokens beyond the eos": {"min_tokens": 14, "max_tokens": 16},
    "min_tokens as many as max_tokens": {"min_tokens": 12, "max_tokens": 12},
    "min_tokens before a stop": {"min_tokens": 6, "stop": [" of", " a", "."], "max_tokens": 16},
    "min_tokens before a stop id": {"min_tokens": 5, "stop_token_ids": [OF, 253, 3575], "max_tokens": 12},
    "max_tokens 1": {"max_tokens": 1, "again": True},
    "max_tokens 2": {"max_tokens": 2, "again": True},
    "max_tokens 1, a stop in it": {"max_tokens": 1, "stop": ["T", "l"]},
}

_FORM: dict[str, Fields] = {
    "skip_special_tokens false": {"skip_special_tokens": False, "again": True},
    "specials as the answer": {"allowed_token_ids": [ENDOFTEXT], "skip_special_tokens": False, "max_tokens": 3},
    "specials as the answer, hidden": {"allowed_token_ids": [ENDOFTEXT], "max_tokens": 3},
    "spaces_between_special_tokens false": {"spaces_between_special_tokens": False, "skip_special_tokens": False},
    "user": {"user": "somebody"},
    "user empty": {"user": ""},
    "metadata": {"metadata": {"team": "a"}},
    "n 1": {"n": 1},
    "cache_salt": {"cache_salt": "salt"},
    "priority": {"priority": 1},
    "kv_transfer_params null": {"kv_transfer_params": None},
    "kv_transfer_params of a client": {"kv_transfer_params": {"anchorleg": {"claim": "forged"}, "do_remote_decode": True}},
    "request_id": {"request_id": "of-the-client"},
    "a request id in the headers": {"headers": {"x-request-id": "of-the-header"}},
    "session_id": {"session_id": "a session"},
    "fields of beam search": {"length_penalty": 1.2, "use_beam_search": False},
    "fields without effect": {
        "truncation_side": "left",
        "logprob_token_ids": [],
        "ec_transfer_params": {},
        "vllm_xargs": {},
        "thinking_token_budget": -1,
        "stream_interval": 1,
        "routed_experts_prompt_start": 0,
        "watermarking": False,
    },
    "fields of the render endpoints": {"return_token_offsets": True, "mm_payload": "none", "return_mm_kwargs": False},
    "OpenAI's fields that vLLM ignores": {
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "a",
        "prompt_cache_key": "b",
    },
}

_GREEDY: dict[str, Fields] = {"greedy": {}}

_IN_BOTH_FORMS: dict[str, Fields] = {
    "return_token_ids": {"return_token_ids": True, "again": True},
    "return_token_ids, specials and stop": {"return_token_ids": True, "stop": [" of", " a"], "max_tokens": 12},
    "emoji across tokens": {
        "structured_outputs": {"choice": ["naïve 😀 日本語 👩‍👩‍👧"]},
        "max_tokens": 40,
        "return_token_ids": True,
    },
}

_STREAMS: dict[str, Fields] = {
    "usage asked for": {"stream_options": {"include_usage": True}, "again": True},
    "usage not asked for": {"stream_options": {"include_usage": False}, "max_tokens": 3},
    "usage null": {"stream_options": {"include_usage": None}, "max_tokens": 3},
    "stream_options null": {"stream_options": None, "max_tokens": 3},
    "stream_options empty": {"stream_options": {}, "max_tokens": 3},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "again": True},
    "continuous usage alone": {"stream_options": {"continuous_usage_stats": True}},
    "continuous usage, ids, stop": {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "stop": ["of F", "l tow"],
        "max_tokens": 20,
    },
    "one token, usage": {"stream_options": {"include_usage": True}, "max_tokens": 1},
    "ended by its first token": {"stream_options": {"include_usage": True}, "allowed_token_ids": [END]},
}

_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}

_STRUCTURED: dict[str, Fields] = {
    "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 16},
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": _SCHEMA}},
        "max_tokens": 40,
    },
    "json_schema, strict": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": _SCHEMA, "strict": True}},
        "max_tokens": 40,
    },
    "response_format text": {"response_format": {"type": "text"}, "max_tokens": 3},
    "structured json": {"structured_outputs": {"json": _SCHEMA}, "max_tokens": 40, "again": True},
    "structured regex": {"structured_outputs": {"regex": r"[A-Z][a-z]{2,5}: \d\d"}, "max_tokens": 24},
    "structured choice": {"structured_outputs": {"choice": ["London", "Paris", "Rome"]}},
    "structured grammar": {"structured_outputs": {"grammar": 'root ::= "yes" | "no" | "per" "haps"'}},
    "structured choice, min_tokens": {"structured_outputs": {"choice": ["Rome", "Paris"]}, "min_tokens": 6, "max_tokens": 8},
    "structured choice, ignore_eos": {"structured_outputs": {"choice": ["Rome", "Paris"]}, "ignore_eos": True, "max_tokens": 8},
    "structured regex, stop": {"structured_outputs": {"regex": r"[a-z]{3} [a-z]{3}"}, "stop": [" "]},
    "structured regex, a newline first": {"structured_outputs": {"regex": r"\n [a-z]{3}"}, "return_token_ids": True},
    "structured json, penalties": {"structured_outputs": {"json": _SCHEMA}, "repetition_penalty": 1.2, "max_tokens": 24},
}

_STRUCTURAL_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<city>", "schema": _SCHEMA, "end": "</city>"}],
    "triggers": ["<city>"],
}

_DRAWN: dict[str, Fields] = {
    "temperature 1": {"temperature": 1, "seed": 11},
    "temperature, top_p, top_k, min_p": {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "seed": 12},
    "without a seed": {"temperature": 0.8},
}


def _logprobs() -> list[Case]:
    chats: dict[str, Fields] = {
        "logprobs": {"logprobs": True},
        "top_logprobs 0": {"logprobs": True, "top_logprobs": 0, "again": True},
        "top_logprobs 1": {"logprobs": True, "top_logprobs": 1, "again": True},
        "top_logprobs 5": {"logprobs": True, "top_logprobs": 5, "again": True},
        "top_logprobs null": {"logprobs": True, "top_logprobs": None, "max_tokens": 3},
        "logprobs false": {"logprobs": False, "top_logprobs": 0, "max_tokens": 3},
        "logprobs of a stop": {"logprobs": True, "top_logprobs": 2, "stop": ["of F"]},
        "logprobs as ids": {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True},
        "logprobs of bytes": {
            "logprobs": True,
            "top_logprobs": 3,
            "max_tokens": 24,
            "structured_outputs": {"choice": ["日本語 😀 é"]},
        },
        "logprobs under a mask": {"logprobs": True, "top_logprobs": 3, "allowed_token_ids": FEW, "presence_penalty": 1.0},
        "logprobs of the eos": {"logprobs": True, "top_logprobs": 1, "max_tokens": 16, "return_token_ids": True},
        "top_logprobs 20": {"logprobs": True, "top_logprobs": 20, "max_tokens": 4},
    }
    texts: dict[str, Fields] = {
        "logprobs 0": {"logprobs": 0, "again": True},
        "logprobs 1": {"logprobs": 1, "again": True},
        "logprobs 5": {"logprobs": 5, "again": True},
        "logprobs null": {"logprobs": None, "max_tokens": 3},
        "logprobs of a stop": {"logprobs": 2, "stop": [" village", "small"], "max_tokens": 20},
        "logprobs as ids": {"logprobs": 2, "return_tokens_as_token_ids": True},
        "logprobs of bytes": {"logprobs": 3, "max_tokens": 24, "structured_outputs": {"choice": ["日本語 😀 é"]}},
        "logprobs of one allowed id": {"logprobs": 5, "allowed_token_ids": [PARIS], "max_tokens": 4},
        "logprobs 20": {"logprobs": 20, "max_tokens": 4},
        "as ids, without logprobs": {"return_tokens_as_token_ids": True, "max_tokens": 3},
    }
    return spread(chats, streaming="both", paths=(Path.CHAT,)) + spread(texts, streaming="both", paths=(Path.COMPLETIONS,))


def streamed_chats() -> list[Case]:
    """Return streams whose text is held back, or whose tokens have none."""
    held_back = ("stop", "stop across tokens", "stop that never comes", "max_tokens 1, a stop in it", "ignore_eos")
    textless = ("usage asked for", "continuous usage", "ended by its first token")
    again = ("stop", "stop that never comes", "ignore_eos", "usage asked for")
    table = {f"parsed: {name}": {**{**_ENDINGS, **_STREAMS}[name], "again": name in again} for name in held_back + textless}
    return spread(table, streaming="yes", paths=(Path.CHAT,))


def cases() -> list[Case]:
    """Return the cases of the fields that both endpoints have."""
    structural = chat("chat: structural_tag", response_format=_STRUCTURAL_TAG, max_tokens=16)
    return [
        *spread(_GREEDY, streaming="both", each_is_new=True),
        *spread(_IN_BOTH_FORMS, streaming="both"),
        *spread(_CHOOSING),
        *spread(_PENALTIES),
        *spread(_MASKS),
        *spread(_ENDINGS),
        *spread(brief(_FORM)),
        *spread(_STREAMS, streaming="yes"),
        *spread(_STRUCTURED),
        *spread({name: {**fields, "sampled": True} for name, fields in _DRAWN.items()}),
        *_logprobs(),
        structural,
        chat("chat: greedy, another question", question=COLOURS, max_tokens=24),
        text("text: greedy, until the eos", prompt="The capital of France is", max_tokens=24),
    ]
