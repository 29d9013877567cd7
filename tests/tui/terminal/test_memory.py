"""Tests of what the program keeps in memory: no closed screen, no more of a run after many steps, and no free page."""

import gc
import mmap
import sys
import types
import weakref
from typing import Any

import numpy as np
import psutil
from tests.tui.support.driving import driven, until
from tests.tui.support.recorded import NOW, committed, rank_step, run_view, snapshot, source_of
from textual._styles_cache import StylesCache
from textual.pilot import Pilot

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.dialogs.help import HelpScreen
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.state import reducer
from trainctl.tui.state import view_state as md
from trainctl.tui.terminal import terminal_app

RANKS = 2
"""Ranks that are kept; their series stand for all."""
VIEW = run_view(4, step=0, steps=9000)


async def test_nothing_of_a_closed_screen_is_kept() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        shown: list[weakref.ref[StylesCache]] = []
        for _ in range(3):
            await pilot.press("question_mark")
            await until(pilot, lambda: isinstance(app.screen, HelpScreen))
            shown += [weakref.ref(widget._styles_cache) for widget in app.screen.query("*")]
            await pilot.press("escape")
            await until(pilot, lambda: isinstance(app.screen, OverviewScreen))
        assert len(shown) >= 3

        def gone() -> bool:
            terminal_app.give_back()
            return all(cache() is None for cache in shown)

        await until(pilot, gone)

    await driven(source_of(1), play)


def test_cycles_and_free_pages_are_given_back() -> None:
    class Knot:
        def __init__(self) -> None:
            self.itself = self

    knot = weakref.ref(Knot())
    blocks = [bytes([1]) * 60_000 for _ in range(1000)]
    kept = blocks[::16]  # the allocator cannot end the heap below them
    full = psutil.Process().memory_info().rss
    blocks.clear()
    terminal_app.give_back()
    assert knot() is None
    assert len(kept) == 63
    if sys.platform == "linux":
        assert full - psutil.Process().memory_info().rss > 30e6


def fed(state: md.ViewState, first: int, last: int) -> md.ViewState:
    """The state after these steps of all ranks."""
    for step in range(first, last + 1):
        state = reducer.apply(state, committed(VIEW, step, seq=state.seq + 1), 5000.0 + step)
        for rank in range(RANKS):
            state = reducer.apply(state, rank_step(VIEW, step, rank, seq=state.seq + 1), 5000.0 + step)
    return state


def held_bytes(root: object) -> int:
    """The size of all that a value leads to, each thing once; an array's is that of the pages that it is in."""
    seen: dict[int, object] = {}
    left: list[Any] = [root]
    while left:
        item = left.pop()
        if id(item) not in seen and not isinstance(item, type | types.ModuleType | types.FunctionType):
            seen[id(item)] = item
            of_array = isinstance(item, np.ndarray) and item.base is not None
            left += [item.base] if of_array else [item.obj] if isinstance(item, memoryview) else gc.get_referents(item)
    return sum(len(item) if isinstance(item, mmap.mmap) else sys.getsizeof(item) for item in seen.values())


def test_a_state_holds_no_more_after_many_steps() -> None:
    state = fed(reducer.apply(md.ViewState(), snapshot(VIEW), NOW), 1, 150)
    soon = held_bytes(state)
    state = fed(state, 151, 1300)
    assert soon > 500_000
    assert held_bytes(state) < 1.02 * soon
