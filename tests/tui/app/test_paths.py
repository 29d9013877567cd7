"""The functions between a socket and a cell, and between Enter and the wire; and the calls that a step costs.

Whoever looks for a fault reads them one by one. A function is on a path if it is on the stack where one of the path's
parts ends. Only functions of the terminal program and of the protocol count.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from tests.tui.support.driving import until
from tests.tui.support.simulated_cluster import simulated_cluster

import trainctl.tui
from trainctl.protocol.messages import Command
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.state.source import ClusterSource

MAX_TO_CELL, MAX_TO_WIRE = 30, 14
MAX_CALLS = 4500
"""By step, about 3,000 on an idle machine: heartbeats and clocks repaint too, and steps come at their own pace."""
STEPS = 5
ROOMS = Path(next(iter(trainctl.tui.__path__))).parents[2]
TO_CELL = ("decode_live", "LiveFeed._take", "_step", "_loss", "Lines.show")
"""A step's loss: received, taken into the state, formatted for the header, drawn."""
TO_WIRE = ("CommandDialog.action_send", "send", "Client._transmit")
Function = tuple[str, str]


def function_of(frame: FrameType) -> Function | None:
    """Return the file and name of a frame's function if it is ours."""
    file = Path(frame.f_code.co_filename)
    is_ours = file.is_relative_to(ROOMS) and not {"tests", ".venv"} & {*file.parts}
    return (file.name, frame.f_code.co_qualname) if is_ours else None


@contextmanager
def stacks(*ends: str) -> Iterator[tuple[dict[str, list[Function]], Counter[Function]]]:
    """Keep the newest stack, of our functions, at a call of each end, and count all calls."""
    kept: dict[str, list[Function]] = {}
    counted: Counter[Function] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        function = function_of(frame) if event == "call" else None
        if function is None or "<" in function[1].rsplit(".", 1)[-1]:
            return
        counted[function] += 1
        if function[1] in ends and (
            function[1] != "Client._transmit" or isinstance(frame.f_locals["request"], Command)
        ):
            outer: FrameType | None = frame
            names = []
            while outer is not None:
                names.append(function_of(outer))
                outer = outer.f_back
            kept[function[1]] = [name for name in names if name is not None]

    sys.setprofile(note)
    try:
        yield kept, counted
    finally:
        sys.setprofile(None)


def on_path(kept: dict[str, list[Function]]) -> dict[Function, None]:
    return dict.fromkeys(function for names in kept.values() for function in names)


@pytest.mark.tier("all")
async def test_few_functions_lie_between_a_socket_and_a_cell_and_between_enter_and_the_wire(tmp_path: Path) -> None:
    with simulated_cluster(tmp_path, 3, 100_000) as cluster:
        source = ClusterSource(cluster.address, by="tester")
        app = TrainctlApp(lambda: source, address=cluster.address)

        def step() -> int:
            return app.live.run.step if app.live.run is not None else 0

        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: step() > 3)
            with stacks(*TO_CELL) as (to_cell, counted):
                first = step()
                await until(pilot, lambda: step() >= first + STEPS)
                calls = counted.total() / (step() - first)
            await pilot.press("b", "backspace", "backspace", "4")
            await until(pilot, lambda: isinstance(app.screen, CommandDialog) and app.screen.order is not None)
            with stacks(*TO_WIRE) as (to_wire, _):
                await pilot.press("enter")
                await until(pilot, lambda: "Client._transmit" in to_wire)
    print(
        f"\n{len(on_path(to_cell))} functions to a cell, {len(on_path(to_wire))} to the wire, {calls:.0f} calls a step"
    )
    assert {*TO_CELL} == to_cell.keys() and {*TO_WIRE} == to_wire.keys()
    assert len(on_path(to_cell)) <= MAX_TO_CELL
    assert len(on_path(to_wire)) <= MAX_TO_WIRE
    assert calls <= MAX_CALLS
