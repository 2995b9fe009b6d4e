"""The angles by which RoPE turns the heads: one frequency for each pair of dimensions, stretched for long contexts or not.

Frequencies: Su et al., "RoFormer" (2021). The stretches are transformers' rope types of the same names, which vLLM has too:
linear, YaRN (Peng et al., "YaRN", 2023), llama3 (Llama 3.1's reference code).
"""

import math

import torch

from decode_daemon.engine.config import LinearScaling, Llama3Scaling, LlamaConfig, YarnScaling


def rope_frequencies(config: LlamaConfig) -> torch.Tensor:
    """Return the angle by which a pair of dimensions turns from one position to the next, float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    match config.rope_scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        case YarnScaling() as scaling:
            first, last = _yarn_band(config, scaling)
            kept = 1 - (torch.arange(len(frequencies), dtype=torch.float32) - first) / (last - first)
    return torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0.0, 1.0))


def rope_magnitude(config: LlamaConfig) -> float:
    """Return what cos and sin are multiplied with: other than 1 for YaRN, which sharpens attention over stretched contexts."""
    scaling = config.rope_scaling
    return scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0


def _yarn_band(config: LlamaConfig, scaling: YarnScaling) -> tuple[float, float]:
    """Return the pairs between which YaRN goes over from frequencies that it keeps to those that it divides by the factor.

    They turn `beta_fast` and `beta_slow` times within the original context.
    """

    def pair(turns: float) -> float:
        longest = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return config.head_dim * math.log(longest) / (2 * math.log(config.rope_theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    return first, last + 0.001 if first == last else last
