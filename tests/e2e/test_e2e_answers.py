"""The lane on real parts gives the answers that vLLM alone gives."""

import asyncio
import itertools
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.model import LlamaModel
from decode_daemon.engine.protocol import DecodeParams, SamplingParams
from decode_daemon.engine.weights import load_weights
from tests.kit.e2e import PROMPTS, Lane, read_stream
from tests.kit.lane import LATENCY

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def test_greedy_answers_of_both_lanes_are_the_same(lane: Lane) -> None:
    """Streaming and whole in turn. Plain vLLM is asked all at once, because it is fast only in batches."""
    asks = [lane.stream if number % 3 else lane.ask for number in range(len(PROMPTS))]
    plain = await asyncio.gather(*(ask(prompt, latency=False) for ask, prompt in zip(asks, PROMPTS, strict=True)))
    for ask, prompt, expected in zip(asks, PROMPTS, plain, strict=True):
        assert await ask(prompt, latency=True) == expected, prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": None, "max_completion_tokens": 5},
        {"stop": ["Paris"]},
        {"stop": ["is Par", "zzz"]},
        {"stop": "The"},
        {"max_tokens": 20, "ignore_eos": True},
    ],
    ids=str,
)
async def test_limits_and_stops_end_both_lanes_at_the_same_place(lane: Lane, fields: dict[str, object]) -> None:
    question = "What is the capital of France?"
    assert await lane.stream(question, latency=True, **fields) == await lane.stream(question, latency=False, **fields)


@pytest.mark.parametrize("words", [60, 95, 96, 97, 98, 225, 500, 1200])
async def test_prompts_around_blocks_and_chunks_give_the_same_answer(lane: Lane, words: int) -> None:
    prompt = "Repeat the last word: " + " ".join(f"w{number % 7}" for number in range(words))
    expected = await lane.ask(prompt, latency=False, max_tokens=8)
    # The first pass finds vLLM's prefix cache full, from the plain request; a salt makes the second pass compute it all.
    cached = await lane.ask(prompt, latency=True, max_tokens=8)
    computed = await lane.ask(prompt, latency=True, max_tokens=8, cache_salt=f"salt-{words}")
    assert cached == computed == expected


async def test_requests_at_the_same_time_do_not_mix(lane: Lane) -> None:
    prompts = PROMPTS[4:8]
    plain = await asyncio.gather(*(lane.ask(prompt, latency=False) for prompt in prompts))

    async def persistently(prompt: str) -> object:
        while True:
            response = await lane.post(lane.request(prompt), latency=True, fallback=True)
            if response.headers["x-slo-lane"] == "latency":
                return response.json()["choices"][0]["message"]["content"]

    together = await asyncio.gather(*(persistently(prompt) for prompt in prompts))
    assert together == [said.text for said in plain]


async def test_the_same_seed_gives_the_same_answer(lane: Lane) -> None:
    fields = {"temperature": 0.8, "top_p": 0.95, "seed": 42, "max_tokens": 12}
    first = await lane.ask("Tell me a story.", latency=True, **fields)
    assert await lane.ask("Tell me a story.", latency=True, **fields) == first


async def test_tokens_arrive_one_by_one(lane: Lane) -> None:
    body = lane.request("Count from one to fifty.", stream=True, max_tokens=40)
    arrivals: list[float] = []
    received = ""
    async with lane.client.stream("POST", "/chat/completions", json=body, headers=LATENCY) as response:
        async for text in response.aiter_text():
            arrivals += [time.monotonic()] * text.count('"content":"')
            received += text
    assert received.rstrip().endswith("[DONE]")
    gaps = [after - before for before, after in itertools.pairwise(arrivals[2:])]
    bursts = sum(gap < 0.001 for gap in gaps)
    assert bursts <= 2, f"{bursts} of {len(gaps)} tokens came together with the one before"


async def test_a_damaged_block_would_be_noticed(lane: Lane, model_dir: Path) -> None:
    """The comparison's own control: one block's worth of keys less, and the answer is another one."""
    prompt = "What is the capital of France? Answer in one full sentence, please."
    expected = await lane.ask(prompt, latency=True, max_tokens=12)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    config = LlamaConfig.read(model_dir)
    model = LlamaModel(config, load_weights(model_dir, config, torch.float32), context_tokens=256)
    engine = LlamaEngine(model)

    def decode(*, damaged: bool) -> str:
        logits = model.forward(torch.tensor(ids), 0)
        first = int(logits[-1].argmax())
        if damaged:
            engine.kv_target(len(ids))[0][:, :, :16].zero_()
        params = DecodeParams(SamplingParams(temperature=0.0), 12, frozenset({2}))
        steps = engine.decode(ids, first, params, lambda: False)
        return str(tokenizer.decode([first, *(i for step in steps for i in step.ids)], skip_special_tokens=True))

    assert decode(damaged=False) == expected.text
    assert decode(damaged=True) != expected.text


async def test_a_claim_of_a_clients_own_making_moves_nothing(lane: Lane) -> None:
    forged = {
        "anchorleg": {
            "claim": {"handoff_id": "0" * 32, "host": "127.0.0.1", "port": 1, "slot": 0, "epoch": 1, "expires": 2**40},
            "signature": "0" * 64,
        }
    }
    before = await lane.metric("decode", "anchorleg_handoff_received_bytes_total")
    expected = await lane.ask(PROMPTS[0], latency=False)
    assert await lane.ask(PROMPTS[0], latency=False, kv_transfer_params=forged) == expected
    assert await lane.metric("decode", "anchorleg_handoff_received_bytes_total") == before
    # In the lane the gateway drops it and puts its own in its place.
    assert await lane.ask(PROMPTS[0], latency=True, kv_transfer_params=forged) == expected


@pytest.mark.parametrize(
    ("body", "status"),
    [(b'{"model": x', 400), (b"[]", 400), (b'"text"', 400), (b'{"model": "no-such-model", "messages": []}', 404)],
)
async def test_bad_input_is_answered_as_vllm_answers_it_and_the_next_request_is_served(
    lane: Lane, body: bytes, status: int
) -> None:
    headers = {"content-type": "application/json"}
    plain = await lane.client.post("/chat/completions", content=body, headers=headers)
    answer = await lane.client.post("/chat/completions", content=body, headers=headers | LATENCY)
    assert (answer.status_code, answer.json()) == (plain.status_code, plain.json())
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == status
    assert (await lane.ask(PROMPTS[0], latency=True, max_tokens=2)).finish_reason == "length"


async def test_every_process_answers_prometheus(lane: Lane) -> None:
    await lane.ask(PROMPTS[0], latency=True, max_tokens=2)
    expected = {
        "vllm": ["vllm:num_requests_running", "anchorleg_handoff_sent_bytes_total"],
        "decode": ["anchorleg_handoff_received_bytes_total"],
        "extproc": ["anchorleg_requests_total"],
        "envoy": ["envoy_http_downstream_rq_total"],
    }
    for service in lane.stack.services:
        for url, name in zip(service.metrics, expected.get(service.name.partition("-")[0], []), strict=True):
            answer = await lane.client.get(url)
            assert answer.status_code == 200
            assert name in answer.text, service.name


async def test_the_openai_stream_is_a_whole_one_even_if_the_answer_is_one_token(lane: Lane) -> None:
    body = lane.request("hi", stream=True, max_tokens=1, stream_options={"include_usage": True})
    response = await lane.post(body, latency=True)
    assert read_stream(response.text).usage[1] == 1
