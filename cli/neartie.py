"""Is a greedy answer of another engine right?

In bfloat16 two engines round differently, and where two tokens are almost equally likely either may win; from there on the
texts part. So an answer that is not the same as vLLM's is fed to vLLM: each of its tokens must be the one that vLLM would have
taken there, or one so close behind it that rounding explains it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

_SPACING = 0.125  # of vLLM's logits in bfloat16 between 16 and 32, where those of likely tokens are
MAX_GAP = 2 * _SPACING + 1e-4
"""Nats. Rounding moves each of two logits to a neighbour; vLLM's own answers are as far behind (tests/fidelity/rounding.py).

The rest is float32's, in which vLLM makes logprobs of them.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the lane's answer is right, and the sentence that says why."""

    right: bool
    sentence: str


async def compare(client: AsyncOpenAI, model: str, prompt: str, *, plain: str, lane: str) -> Verdict:
    """Judge the lane's text by vLLM's own; `client` must reach plain vLLM."""
    if not lane:
        return Verdict(False, "the lane gave no text")
    if plain == lane:
        return Verdict(True, "The texts are the same.")
    asked = await _ids(client, {"model": model, "messages": [{"role": "user", "content": prompt}]})
    said = await _ids(client, {"model": model, "prompt": lane, "add_special_tokens": False})
    behind = await gaps(client, model, asked, said)
    worst, ties = max(behind), sum(gap > 0 for gap in behind)
    where = f"The texts differ; of the lane's {len(said)} tokens vLLM would have chosen {len(said) - ties} itself"
    if not ties:
        return Verdict(
            True, f"The texts differ; each of the lane's {len(said)} tokens is vLLM's own choice when it is asked anew."
        )
    if worst > MAX_GAP:
        return Verdict(False, f"{where}, and one of the others is {worst:.2f} nats less likely than its own choice.")
    return Verdict(True, f"{where}, and the others are near-ties, {worst:.3f} nats behind its own choice at the most.")


async def gaps(client: AsyncOpenAI, model: str, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Return how far each token of an answer is behind the one that vLLM would take there: in nats, 0 where it is that one.

    `prompt` and `answer` are ids; vLLM reads them in one pass. `client` must reach plain vLLM.
    """
    read = await client.completions.create(
        model=model, prompt=[*prompt, *answer], max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 1}
    )
    positions: list[dict[str, Any]] = read.choices[0].model_dump()["prompt_logprobs"][len(prompt) :]
    return [_gap(position, token) for position, token in zip(positions, answer, strict=True)]


async def _ids(client: AsyncOpenAI, body: dict[str, Any]) -> list[int]:
    url = str(client.base_url).removesuffix("/").removesuffix("/v1") + "/tokenize"
    answer: dict[str, Any] = await client.post(url, cast_to=dict[str, Any], body=body)
    return [int(token) for token in answer["tokens"]]


def _gap(position: dict[str, Any], token: int) -> float:
    """Return how much less likely a token is than the likeliest one, in nats."""
    return float(max(entry["logprob"] for entry in position.values()) - position[str(token)]["logprob"])
