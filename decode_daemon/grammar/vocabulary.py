"""A model's vocabulary as xgrammar wants it, read as vLLM 0.32 reads it (tokenizers/registry.py, tokenizers/hf.py)."""

from pathlib import Path
from typing import TYPE_CHECKING

from decode_daemon.grammar.errors import GrammarUnsupported

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo


def read_vocabulary(model_dir: Path, vocab_size: int) -> "TokenizerInfo":
    """Return the vocabulary of a Hugging Face folder for a model of `vocab_size` ids.

    Takes seconds the first time in a process. Raises GrammarUnsupported for one that vLLM reads otherwise, ImportError, or
    whatever transformers and xgrammar raise.
    """
    if any(model_dir.glob("consolidated*.safetensors")) and (
        (model_dir / "tekken.json").exists() or any(model_dir.glob("tokenizer.model.v*"))
    ):
        raise GrammarUnsupported(
            "vLLM reads the model's tokenizer with mistral-common: "
            "serve a folder without consolidated weights, tekken.json and tokenizer.model.v*"
        )
    from transformers import AutoTokenizer
    from xgrammar import TokenizerInfo

    tokenizer = AutoTokenizer.from_pretrained(model_dir, truncation_side="left", mistral_format=False, local_files_only=True)
    return TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
