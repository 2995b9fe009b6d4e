"""`anchorleg demo`: the same chat requests down both lanes, side by side, and whether the lane's answers are right."""

import asyncio
import time
from dataclasses import dataclass
from typing import Never

from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from cli.display import StartDisplay
from cli.neartie import Verdict, compare
from cli.settings import LocalSettings
from cli.stack import Stack
from cli.up import until_stopped

PROMPTS = (
    "What is the capital of France?",
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five animals that live in the sea.",
)
MAX_TOKENS = 64
EXIT_RIGHT, EXIT_WRONG = 0, 1


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer: its text and when its tokens came, in seconds from sending the request."""

    text: str
    lane: str
    arrivals: tuple[float, ...]
    tokens: int

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.arrivals[0]

    @property
    def gap(self) -> float | None:
        """From token 1 to token 2: in the latency lane, the handoff."""
        return self.arrivals[1] - self.arrivals[0] if len(self.arrivals) > 1 else None

    @property
    def per_token(self) -> float | None:
        """Time per output token after token 2."""
        return (
            (self.arrivals[-1] - self.arrivals[1]) / (self.tokens - 2) if self.tokens > 2 and len(self.arrivals) > 2 else None
        )

    @property
    def total(self) -> float:
        """End to end."""
        return self.arrivals[-1]


def run(settings: LocalSettings) -> int:
    """Start the stack, compare the lanes, stop it; 0 only if both lanes answered and the lane's answers are right.

    Raises ProcessError when the stack cannot start.
    """
    console = Console()
    return asyncio.run(_run(settings, console))


async def _run(settings: LocalSettings, console: Console) -> int:
    outcome = EXIT_WRONG

    async def work() -> Never:
        nonlocal outcome
        with StartDisplay(console) as display:
            async with Stack(settings, report=display) as stack:
                death = asyncio.create_task(stack.first_death())
                showing = asyncio.create_task(_compare(stack, settings, console))
                await asyncio.wait({death, showing}, return_when=asyncio.FIRST_COMPLETED)
                if not showing.done():
                    showing.cancel()
                    raise await death
                death.cancel()
                outcome = EXIT_RIGHT if await showing else EXIT_WRONG
        raise asyncio.CancelledError  # what until_stopped takes for an orderly end

    status = await until_stopped(work(), console)
    return status or outcome


async def _compare(stack: Stack, settings: LocalSettings, console: Console) -> bool:
    async with (
        AsyncOpenAI(base_url=stack.base_url, api_key="-", max_retries=0) as throughput,
        AsyncOpenAI(base_url=stack.base_url, api_key="-", max_retries=0, default_headers={"x-slo-class": "latency"}) as latency,
    ):
        model = settings.served_model_name
        for client in (throughput, latency):
            await _ask(client, model, "Say hello.")  # vLLM's first request pays for compilation; nobody's figures shall
        right = True
        table = _figures_table()
        for prompt in PROMPTS:
            plain, lane = await _ask(throughput, model, prompt), await _ask(latency, model, prompt)
            verdict = await compare(throughput, model, prompt, plain=plain.text, lane=lane.text)
            right &= bool(plain.text) and lane.lane == "latency" and verdict.right
            _show(console, prompt, plain, lane, verdict)
            _add_figures(table, prompt, plain, lane)
        console.print(table)
        console.print("Both lanes answered, and the latency lane is right." if right else "The latency lane is NOT right.")
        return right


async def _ask(client: AsyncOpenAI, model: str, prompt: str) -> Answer:
    began = time.perf_counter()
    raw = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, tokens, arrivals = "", 0, []
    async for chunk in raw.parse():
        if chunk.choices and chunk.choices[0].delta.content:
            text += chunk.choices[0].delta.content
            arrivals.append(time.perf_counter() - began)
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    return Answer(text, raw.headers.get("x-slo-lane", "throughput"), tuple(arrivals) or (time.perf_counter() - began,), tokens)


def _show(console: Console, prompt: str, plain: Answer, lane: Answer, verdict: Verdict) -> None:
    table = Table(title=prompt, title_justify="left", show_lines=True, expand=True)
    table.add_column("throughput: vLLM alone", ratio=1)
    table.add_column(f"latency: the lane ({lane.lane})", ratio=1)
    table.add_row(plain.text, lane.text)
    console.print(table)
    console.print(verdict.sentence, markup=False)


def _figures_table() -> Table:
    table = Table(title="throughput → latency lane, milliseconds")
    for column in ("prompt", "time to token 1", "token 1 to 2", "per token after", "end to end", "tokens"):
        table.add_column(column, justify="left" if column == "prompt" else "right")
    return table


def _add_figures(table: Table, prompt: str, plain: Answer, lane: Answer) -> None:
    pairs = ((plain.ttft, lane.ttft), (plain.gap, lane.gap), (plain.per_token, lane.per_token), (plain.total, lane.total))
    figures = [f"{_ms(before)} → {_ms(after)}" for before, after in pairs]
    table.add_row(prompt if len(prompt) < 40 else prompt[:37] + "...", *figures, f"{plain.tokens} → {lane.tokens}")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
