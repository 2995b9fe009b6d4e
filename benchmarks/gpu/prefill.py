"""Stock vLLM with the connector, as a child process: `python -m benchmarks.gpu.prefill OPTIONS` (see `Options`)."""

import json
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.child import obey, tell

NAME = "proof"  # what the model is called on both sides


@dataclass(frozen=True, slots=True)
class Options:
    """How this vLLM is started. `chunk`: the most tokens of one step. `block`: tokens; 0 leaves it to vLLM."""

    model: str
    context: int
    chunk: int
    block: int
    device: str  # cpu or cuda
    dtype: str


class Prefill:
    """The questions that the other side asks."""

    def __init__(self, options: Options) -> None:
        from vllm import LLM

        extra: dict[str, Any] = {"block_size": options.block} if options.block else {}
        if options.device == "cuda":  # the engine is on the same card
            extra |= {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": 6 << 30}
        self._model = LLM(
            model=options.model,
            served_model_name=NAME,
            skip_tokenizer_init=True,
            dtype=options.dtype,
            max_model_len=options.context,
            max_num_batched_tokens=options.chunk,
            max_num_seqs=4,
            enforce_eager=True,
            worker_extension_cls="benchmarks.gpu.recording.KVReader",
            kv_transfer_config={
                "kv_connector": "RecordingConnector",
                "kv_connector_module_path": "benchmarks.gpu.recording",
                "kv_role": "kv_producer",
            },
            **extra,
        )

    def generate(self, prompt: list[int], tokens: int, params: dict[str, Any] | None) -> dict[str, Any]:
        """Return the greedy ids, how much of the prompt was cached, and the kv_transfer_params of the answer."""
        found = self._ask(prompt, tokens, extra_args={"kv_transfer_params": params} if params else None)
        return {
            "ids": list(found.outputs[0].token_ids),
            "cached": found.num_cached_tokens,
            "params": found.kv_transfer_params,
        }

    def save_kv(self, blocks: list[int], tokens: int, path: str) -> dict[str, Any]:
        """Save what these blocks hold; see KVReader."""
        return {"cache": self._model.collective_rpc("anchorleg_save_kv", args=(blocks, tokens, path))[0]}

    def gaps(self, prompt: list[int], said: list[int]) -> dict[str, Any]:
        """Return, for each id that another engine said after the prompt, by how many nats it is behind the likeliest one."""
        found = self._ask(prompt + said, 1, prompt_logprobs=1)
        places = zip(said, found.prompt_logprobs[len(prompt) :], strict=True)
        gaps = [max(one.logprob for one in place.values()) - place[token].logprob for token, place in places]
        return {"gaps": gaps}

    def _ask(self, prompt: list[int], tokens: int, **wishes: Any) -> Any:
        from vllm import SamplingParams

        wish = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **wishes)
        (found,) = self._model.generate([{"prompt_token_ids": prompt}], wish, use_tqdm=False)
        return found


def main() -> None:
    """Start vLLM, then obey."""
    try:
        prefill = Prefill(Options(**json.loads(sys.argv[1])))
    except Exception as error:
        tell({"error": f"vLLM did not start: {type(error).__name__}: {error}"})
        raise
    obey({"generate": prefill.generate, "save_kv": prefill.save_kv, "gaps": prefill.gaps})


if __name__ == "__main__":
    main()
