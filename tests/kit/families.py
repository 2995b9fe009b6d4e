"""The model families the engine is tested with: transformers' class, and what differs from the tiny model's shape."""

from typing import Any

PROMPT = [5, 90, 3, 41, 7, 7, 62, 18, 2, 33, 76, 11]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # short, so that all three bands of frequencies occur at head_dim 16
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama untied": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    "llama without grouped heads": ("Llama", {"num_key_value_heads": 6}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2 with qkv bias": ("Qwen2", {}),
    "qwen3 with qk norm": ("Qwen3", {}),
    "qwen3 with yarn": ("Qwen3", {"rope_parameters": YARN_ROPE}),
}
