"""`anchorleg bench engine` as a picture: what speculation gains by kind of prompt, and how near a step is to memory's limit."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.engine import CONTEXTS, KINDS
from benchmarks.report import Measure


def draw(measures: Sequence[Measure], path: Path) -> None:
    """Write an SVG of two panels; raises ImportError where matplotlib is not installed."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    values = {measure.name: measure.value for measure in measures}
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasSVG(figure)
    left, right = figure.subplots(1, 2)

    places = range(len(KINDS))
    for offset, name, label in (
        (-0.2, "{}_tokens_per_s", "one token a step"),
        (0.2, "{}_speculating_tokens_per_s", "speculating"),
    ):
        bars = left.bar([place + offset for place in places], _each(values, name, KINDS), 0.4, label=label)
        left.bar_label(bars, fmt="%.0f")
    left.set_xticks(places, KINDS)
    left.set_ylabel("tokens per second")
    left.legend(frameon=False)

    contexts = [context for context in CONTEXTS if f"bandwidth_at_{context}" in values]
    shares = [values[f"bandwidth_at_{context}"] for context in contexts]
    right.plot(contexts, shares, marker="o")
    right.set_xscale("log", base=2)
    right.set_xticks(contexts, [str(context) for context in contexts])
    right.set_ylim(0, 105)
    right.set_xlabel("context, tokens")
    right.set_ylabel("% of the measured read bandwidth")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None})


def _each(values: Mapping[str, float], name: str, kinds: Sequence[str]) -> list[float]:
    return [values[name.format(kind)] for kind in kinds]
