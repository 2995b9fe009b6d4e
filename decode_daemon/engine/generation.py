"""Reads how a model wants to be sampled when a request does not say, as vLLM's `--generation-config auto` does.

The stop ids are the tokenizer's eos token and the eos ids of generation_config.json; where that file is absent, those of
config.json.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode_daemon.engine.config import read_json
from decode_daemon.engine.protocol import EngineError


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """A model's sampling defaults; a value that the model does not give is vLLM's neutral one."""

    eos_token_ids: frozenset[int]  # each ends an answer unless the request ignores eos
    eos_token_id: int | None = None  # the tokenizer's own, one of them
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps every token
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_new_tokens: int | None = None

    @classmethod
    def read(cls, model_dir: Path) -> "GenerationDefaults":
        """Read the JSON files of a Hugging Face folder; raises EngineError naming the file and field that is malformed."""
        path = model_dir / "generation_config.json"
        if not path.is_file():
            path = model_dir / "config.json"
            primary = _tokenizer_eos(model_dir)
            return cls(_eos_ids(primary, read_json(path), path), primary)
        raw = read_json(path)
        primary = _tokenizer_eos(model_dir)
        max_new_tokens = _number(raw, "max_new_tokens", path, 0)
        return cls(
            eos_token_ids=_eos_ids(primary, raw, path),
            eos_token_id=primary,
            temperature=_number(raw, "temperature", path, 1.0),
            top_p=_number(raw, "top_p", path, 1.0),
            # vLLM takes -1 for "all tokens", too.
            top_k=max(0, int(_number(raw, "top_k", path, 0))),
            min_p=_number(raw, "min_p", path, 0.0),
            repetition_penalty=_number(raw, "repetition_penalty", path, 1.0),
            presence_penalty=_number(raw, "presence_penalty", path, 0.0),
            frequency_penalty=_number(raw, "frequency_penalty", path, 0.0),
            max_new_tokens=int(max_new_tokens) or None,
        )


def _number(raw: Mapping[str, Any], field: str, path: Path, default: float) -> float:
    value = raw.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EngineError(f"{path}: {field} is {value!r}, not a number: mend or remove it")
    return value


def _eos_ids(primary: int | None, raw: Mapping[str, Any], path: Path) -> frozenset[int]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise EngineError(f"{path}: eos_token_id is {value!r}, not a token id or a list of them")
    return frozenset(ids if primary is None else [*ids, primary])


def _tokenizer_eos(model_dir: Path) -> int | None:
    """Return the id of tokenizer_config.json's eos_token, None where the folder does not name one."""
    config, tokenizer = model_dir / "tokenizer_config.json", model_dir / "tokenizer.json"
    if not config.is_file() or not tokenizer.is_file():
        return None
    token = read_json(config).get("eos_token")
    if isinstance(token, Mapping):  # the older form writes a token with its properties
        token = token.get("content")
    if token is None:
        return None
    contents = read_json(tokenizer)
    for added in contents.get("added_tokens") or ():
        if added.get("content") == token:
            return int(added["id"])
    vocab = contents.get("model", {}).get("vocab")
    if isinstance(vocab, Mapping) and token in vocab:
        return int(vocab[token])
    raise EngineError(f"{config}: eos_token {json.dumps(token)} is not in {tokenizer.name}: use the model's own files")
