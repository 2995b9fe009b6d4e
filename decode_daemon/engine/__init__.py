"""The decode engine: one sequence, from injected KV cache to token ids."""
