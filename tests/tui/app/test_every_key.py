"""Every key of every screen is pressed, and does what its binding says: none is dead or shadowed."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.tui.support.alerted import CLOCK_ALERT, alerted
from tests.tui.support.driving import until
from tests.tui.support.recorded import CLOCK
from textual.binding import Binding
from textual.dom import DOMNode
from textual.pilot import Pilot

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.app.keymap import EVERYWHERE
from trainctl.tui.screens import base
from trainctl.tui.screens.logs import LogScreen

LEAVING = {"detach", "leave"}


class Program(TrainctlApp):
    """Notes each action that a key runs."""

    actions: ClassVar[list[str]] = []

    async def run_action(self, action: Any, *args: Any, **options: Any) -> bool:
        self.actions.append(str(action))
        return await super().run_action(action, *args, **options)


def own_bindings(kind: type[DOMNode]) -> list[Binding]:
    """What a screen declares or inherits, one for each key."""
    declared = [item for part in kind.__mro__ for item in part.__dict__.get("BINDINGS", ())
                if issubclass(part, DOMNode) and part.__module__.startswith("trainctl.")]  # fmt: skip
    found: dict[str, Binding] = {}
    for binding in itertools.chain.from_iterable(Binding.make_bindings([item]) for item in declared):
        found.setdefault(binding.key, binding)
    return list(found.values())


async def back_to(pilot: Pilot[int], app: TrainctlApp, name: str) -> None:
    """Without windows over it."""
    while len(app.screen_stack) > 2:
        app.pop_screen()
        await pilot.pause()
    app.screen.set_focus(None)
    if app.screen.name == name:
        return
    app.action_show(name)
    await until(pilot, lambda: app.screen is app.get_screen(name) and app.screen.is_mounted)


async def pressed(pilot: Pilot[int], app: Any, binding: Binding) -> None:
    app.actions.clear()
    await pilot.press(binding.key)
    await pilot.pause()
    assert any(binding.action == action for action in app.actions), (
        f"{binding.key} on {type(app.screen).__name__} is {binding.action}, and ran {app.actions or 'nothing'}"
    )


@asynccontextmanager
async def running(pictures: Path) -> AsyncIterator[tuple[Pilot[int], Program]]:
    source = alerted(CLOCK_ALERT)
    app = Program(lambda: source, clock=CLOCK, in_ascii=False, theme="night", pictures=pictures)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.live.heard_at is not None)
        yield pilot, app


@pytest.mark.parametrize("name", base.KINDS)
async def test_of_a_screen(name: str, tmp_path: Path) -> None:
    async with running(tmp_path) as (pilot, app):
        await back_to(pilot, app, name)
        for binding in own_bindings(type(app.screen)):
            await back_to(pilot, app, name)
            if isinstance(app.screen, LogScreen) and app.screen.view.query.pattern is None:
                await pilot.press("slash", "e", "enter")  # keys of a search need one
            await pressed(pilot, app, binding)


async def test_of_the_program(tmp_path: Path) -> None:
    async with running(tmp_path) as (pilot, app):
        *others, detach = sorted(Binding.make_bindings(EVERYWHERE), key=lambda item: item.action == "detach")
        for binding in (*(item for item in others if item.action not in LEAVING), detach):
            await back_to(pilot, app, "overview")
            await pressed(pilot, app, binding)
    assert app.return_code == 0
