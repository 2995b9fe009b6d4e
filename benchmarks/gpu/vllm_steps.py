"""Stock vLLM's time of a token at batch 1, dummy weights of a shape; a program of its own, for vLLM's own Python path.

`python vllm_steps.py CONFIG_DIR CONTEXT...` prints one JSON object: context to milliseconds a token.
"""

import json
import sys
import time
from statistics import median

_TOKENS = 128


def main(folder: str, contexts: list[int]) -> None:
    """Load the shape once and time every context."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, import-untyped, unused-ignore]

    model = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.6,  # one sequence needs no more, and the caller holds some
        max_model_len=max(contexts) + 2 * _TOKENS,
        # One sequence decodes, so graphs of other batch sizes would only make the start longer.
        compilation_config={"cudagraph_capture_sizes": [1]},
    )

    def seconds(prompt: list[int], tokens: int) -> float:
        wish = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        model.generate({"prompt_token_ids": prompt}, wish, use_tqdm=False)
        return time.perf_counter() - begin

    found = {}
    for context in contexts:
        prompt = [3 + (n * 7919) % 100_000 for n in range(context)]
        seconds(prompt, _TOKENS)  # the prompt's blocks stay cached: the timed requests hardly prefill
        pairs = [(seconds(prompt, 1), seconds(prompt, _TOKENS + 1)) for _ in range(3)]
        found[context] = median((long - short) / _TOKENS * 1e3 for short, long in pairs)
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(argument) for argument in sys.argv[2:]])
