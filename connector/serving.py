"""How this vLLM is configured where it shapes an answer: the gateway gives the same answer, or leaves it to vLLM."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def describe_serving(vllm_config: "VllmConfig") -> dict[str, Any]:
    """Return plain JSON, of the form that gateway/serving.py reads.

    An option that this version of vLLM does not have counts as one that is off.
    """
    model = vllm_config.model_config
    structured = getattr(vllm_config, "structured_outputs_config", None)
    defaults = dict(model.get_diff_sampling_param())
    return {
        "defaults": defaults,
        "longest_answer": _longest_answer(model, defaults),
        "logprobs_mode": str(getattr(model, "logprobs_mode", "raw_logprobs")),
        "grammar_backend": str(getattr(structured, "backend", "auto")),
        "compact_json": bool(getattr(structured, "disable_any_whitespace", False)),
        "reasoning_parser": str(getattr(structured, "reasoning_parser", "") or ""),
        "grammar_in_reasoning": bool(getattr(structured, "enable_in_reasoning", False)),
        "watermark": getattr(vllm_config, "watermark_config", None) is not None,
    }


def _longest_answer(model: "ModelConfig", defaults: dict[str, Any]) -> int | None:
    """Return the limit that vLLM puts on every answer's tokens, whatever a request asks for; None for none.

    As its serving classes choose it (override_max_tokens).
    """
    if getattr(model, "generation_config", "auto") not in ("auto", "vllm"):
        return defaults.get("max_tokens")
    overridden = getattr(model, "override_generation_config", None) or {}
    limit: int | None = overridden.get("max_new_tokens")
    return limit
