"""A model's own sampling defaults and stop ids, as vLLM takes them from the model's folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from decode_daemon.engine.generation import GenerationDefaults
from decode_daemon.engine.protocol import EngineError

TOKENIZER = {"added_tokens": [{"id": 11, "content": "<|im_end|>"}], "model": {"vocab": {"</s>": 12}}}


def folder(path: Path, **files: Any) -> Path:
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_generation_config_gives_defaults_and_the_rest_is_neutral(tmp_path: Path) -> None:
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True}
    read = GenerationDefaults.read(folder(tmp_path, config={}, generation_config=given))
    assert read == GenerationDefaults(eos_token_ids=frozenset(), temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05)


def test_the_tokenizers_eos_and_generation_configs_eos_ids_all_stop(tmp_path: Path) -> None:
    read = GenerationDefaults.read(
        folder(
            tmp_path,
            config={"eos_token_id": 99},
            generation_config={"eos_token_id": [1, 2]},
            tokenizer=TOKENIZER,
            tokenizer_config={"eos_token": "<|im_end|>"},
        )
    )
    assert read.eos_token_ids == {1, 2, 11}


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "lstrip": False}])
def test_without_generation_config_the_configs_eos_ids_stop(tmp_path: Path, eos: object) -> None:
    files = {"config": {"eos_token_id": 7}, "tokenizer": TOKENIZER, "tokenizer_config": {"eos_token": eos}}
    assert GenerationDefaults.read(folder(tmp_path, **files)) == GenerationDefaults(frozenset({7, 12}), 12)


def test_a_folder_that_names_no_eos_stops_at_no_id(tmp_path: Path) -> None:
    assert GenerationDefaults.read(folder(tmp_path, config={})).eos_token_ids == frozenset()


def test_max_new_tokens_and_top_k_minus_one_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    given = {"max_new_tokens": 300, "top_k": -1, "temperature": None}
    read = GenerationDefaults.read(folder(tmp_path, config={}, generation_config=given))
    assert (read.max_new_tokens, read.top_k, read.temperature) == (300, 0, 1.0)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"generation_config": {"temperature": "hot"}}, "generation_config.json: temperature is 'hot'"),
        ({"generation_config": {"eos_token_id": ["</s>"]}}, "generation_config.json: eos_token_id is"),
        ({"config": {"eos_token_id": 1.5}}, "config.json: eos_token_id is 1.5"),
        (
            {"config": {}, "tokenizer": TOKENIZER, "tokenizer_config": {"eos_token": "<gone>"}},
            'tokenizer_config.json: eos_token "<gone>" is not in tokenizer.json',
        ),
    ],
)
def test_a_malformed_field_is_refused_with_its_file(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        GenerationDefaults.read(folder(tmp_path, **files))
