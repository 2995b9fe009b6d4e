"""What `anchorleg slots` draws: as much as there is room for, in colours, and nothing that steers the terminal."""

import re

from rich.console import Console

from cli.slots import view
from leases import Node, NodeReport, NodeStatus, PoolReport, SlotReport, WaiterReport
from tests.kit.valkey import node


def _drawn(pools: list[PoolReport], height: int | None = None) -> str:
    console = Console(width=200, height=100, force_terminal=False)
    with console.capture() as capture:
        console.print(view(pools, address="redis://there", height=height))
    return capture.get()


def _pool(nodes: int, *, leased: int = 0, waiting: int = 0, holder: str = "gateway") -> PoolReport:
    """Of one slot in each node, the last ones are leased."""
    reports = []
    for number in range(nodes):
        held = number >= nodes - leased
        slot = SlotReport(0, "leased" if held else "free", 7 if held else None, holder if held else "", "", 5 if held else None)
        reports.append(NodeReport(_node(f"{number:08}"), NodeStatus(), (slot,)))
    return PoolReport("m", tuple(reports), (WaiterReport(holder, "", 5, 70_000),) * waiting, 0, None)


def _node(name: str) -> Node:
    return node(name, model="m")


def test_what_does_not_fit_the_screen_is_counted_and_free_slots_go_first() -> None:
    text = _drawn([_pool(10_000, leased=3, waiting=50)], height=30)
    assert len(text.splitlines()) < 30
    assert len(re.findall(r"0  leased  ", text)) == 3
    assert re.search(r"and 99\d\d more slots", text)
    assert re.search(r"and 4\d more", text)
    for number in (9_997, 9_998, 9_999):
        assert f"{number:08}" in text


def test_states_have_their_colours() -> None:
    console = Console(width=200, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(view([_pool(2, leased=1)], address="redis://there"))
    assert "\x1b[32mfree" in capture.get()
    assert "\x1b[33mleased" in capture.get()


def test_a_narrow_terminal_cuts_lines_instead_of_wrapping_them() -> None:
    console = Console(width=30)
    with console.capture() as capture:
        console.print(view([_pool(3, leased=3)], address="redis://there"))
    _, *lines = capture.get().rstrip().splitlines()
    heading = len(lines) - 4
    assert all(re.match(r"\d{8}  +0  leased", line) for line in lines[heading + 1 :])


def test_without_a_screen_everything_is_shown() -> None:
    text = _drawn([_pool(200, leased=3, waiting=50)])
    assert len(text.splitlines()) == 1 + 1 + 200 + 1 + 50 + 1
    assert " more" not in text


def test_names_cannot_steer_the_terminal() -> None:
    text = _drawn([_pool(1, leased=1, holder="\x1b[2Jevil[red]\nname")])
    assert "?[2Jevil[red]?name" in text
    assert "\x1b" not in text
