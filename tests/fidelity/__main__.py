"""`python -m tests.fidelity`: every case down both lanes of stacks of its own; tables of what was served where.

Exit status 0 only if every case is as it should be, drawn tokens follow vLLM's distribution, and in bfloat16 the lane's tokens
are such that vLLM could have taken.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from cli.display import StartDisplay
from cli.neartie import MAX_GAP
from tests.fidelity.case import Case
from tests.fidelity.catalogue import CASES, PARSED, REASONING
from tests.fidelity.lanes import Outcome
from tests.fidelity.prompts import prompts
from tests.fidelity.report import show, show_draws, show_judgement
from tests.fidelity.rounding import TOKENS, Judgement, judge
from tests.fidelity.sampling import SETTINGS, Drawn, draw
from tests.fidelity.stacks import Running, parsing_stack, reasoning_stack, stack, stack_as_up


async def _run(only: str, draws: int, answers: int, console: Console) -> bool:
    outcomes: list[Outcome] = []
    drawn: list[Drawn] = []
    for kind, all_cases in ((stack, CASES), (parsing_stack, PARSED), (reasoning_stack, REASONING)):
        cases = [case for case in all_cases if only in case.name]
        if not cases and not (kind is stack and draws):
            continue
        with tempfile.TemporaryDirectory(prefix="fidelity-") as folder, StartDisplay(console) as display:
            async with kind(Path(folder), report=display) as running:
                outcomes += await _compare(running, cases, console)
                if kind is stack and draws:
                    console.print(f"drawing {draws} answers of two tokens in each of {len(SETTINGS)} settings")
                    drawn += [await draw(running.both, setting, draws) for setting in SETTINGS]
                await running.quiet()
    judgement = await _judge(answers, console) if answers else None
    good = [show(outcomes, console), show_draws(drawn, console)]
    if judgement is not None:
        good.append(show_judgement(judgement, console))
    return all(good)


async def _judge(answers: int, console: Console) -> Judgement:
    with tempfile.TemporaryDirectory(prefix="fidelity-") as folder, StartDisplay(console) as display:
        async with stack_as_up(Path(folder), report=display) as running:
            judgement = await judge(running, prompts(answers), TOKENS, MAX_GAP, told=console.print)
            await running.quiet()
            return judgement


async def _compare(running: Running, cases: list[Case], console: Console) -> list[Outcome]:
    done = 0

    def count(_: Outcome) -> None:
        nonlocal done
        done += 1
        if done % 50 == 0 or done == len(cases):
            console.print(f"{done} of {len(cases)} cases")

    return await running.both.outcomes(cases, done=count)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fidelity", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name has this in it")
    parser.add_argument("--draws", type=int, default=1_000, help="answers drawn in each setting, by each lane (1000); 0: none")
    parser.add_argument(
        "--answers",
        type=int,
        default=50,
        help=f"answers of {TOKENS} tokens that vLLM judges in bfloat16 (50, the most); 0: none",
    )
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    sys.exit(0 if asyncio.run(_run(arguments.only, arguments.draws, arguments.answers, console)) else 1)


if __name__ == "__main__":
    main()
