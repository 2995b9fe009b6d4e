"""Small models to convert, and ways to run a conversion: here, as a command, and in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file

from cli.convert import Wanted, run
from decode_daemon.engine.checkpoint import expected_shapes
from decode_daemon.engine.config import parse_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FILES = 5  # the embedding, three layers, and what follows them


def model(folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    folder.mkdir()
    config = CONFIG | changes
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(parse_config(config))
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    return folder


def convert(model_dir: Path, save_dir: Path, **options: Any) -> None:
    run(Wanted(model_dir=model_dir, save_dir=save_dir, **options), Console(quiet=True))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def anchorleg(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def script(text: str, *arguments: object, inside: Sequence[str] = ()) -> list[str]:
    """Run Python code that finds `source`, `target` (the first arguments) and `convert`; return the lines it prints."""
    ready = """
        import os, resource, signal, sys
        from pathlib import Path
        from rich.console import Console
        from cli.convert import ConvertError, Wanted, run
        source, target = map(Path, sys.argv[1:3])
        def convert():
            run(Wanted(model_dir=source, save_dir=target), Console(quiet=True))
    """
    command = [*inside, sys.executable, "-c", dedent(ready) + dedent(text), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
