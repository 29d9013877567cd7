"""Calibration: the chosen node's rate and memory over the micro-batch, and what its machine's parts can do."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import numpy as np
from textual.binding import Binding, BindingType

from trainctl.protocol.calibration.peak import is_comparable, peak, slower
from trainctl.protocol.calibration.profile import DeviceProfile, Pass
from trainctl.protocol.errors import TrainctlError
from trainctl.tui.charts.layout import beside, widths
from trainctl.tui.charts.plot import Block, Plot, draw_panel
from trainctl.tui.charts.traces import Trace
from trainctl.tui.screens import calibration_lines
from trainctl.tui.screens.calibration_lines import number
from trainctl.tui.screens.node import ChosenRankScreen
from trainctl.tui.state.series import Window
from trainctl.tui.text.formatting import gigabytes
from trainctl.tui.text.styled_line import Line, Piece, filled, fit, line, rule
from trainctl.tui.widgets.theme import rank_role


class CalibrationScreen(ChosenRankScreen):
    """The newest profile of the node of the rank that is chosen, over the earlier ones of its kind."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab,right", "turn(1)", "next node", key_display="tab", tooltip="next node"),
        Binding("shift+tab,left", "turn(-1)", "previous node", show=False),
        Binding("escape", "app.show('node')", "node", show=False, tooltip="back to the node"),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._profiles: dict[str, tuple[DeviceProfile, ...]] = {}  # by node, newest first

    def reload(self) -> None:
        """Ask the node's agent for its profiles: when it is opened, and after each attachment."""
        self.run_worker(self._load(), group="profiles", exclusive=True)

    async def _load(self) -> None:
        client, row = self.owner.client, self.row
        if client is None or row is None:
            return
        try:
            found = (await client.calibrations(row.view.node)).profiles
        except TrainctlError as error:
            self.app.notify(str(error), severity="error", markup=False)
            return
        self._profiles[row.view.node] = tuple(one for one in found if is_comparable(one, found[0]))
        self.paint()

    def lines(self, columns: int, rows: int) -> list[Line]:
        owner, row = self.owner, self.row
        node = row.view.node if row is not None else ""
        profiles = self._profiles.get(node, ())
        if row is None or not profiles:
            return [self.head(columns), *no_profile(node or "NODE", columns, rows - 1)][:rows]
        when = owner.clock.time_of(profiles[0].created_at)
        role = rank_role(row.place)
        body = profile_lines(node, profiles, columns, rows - 1, role, when)
        return [self.head(columns), *body][:rows]

    def turned(self) -> None:
        self.reload()


EARLIER: Final = 3
"""Earlier profiles drawn behind the newest."""
MIN_CHART_ROWS: Final = 8
"""Rows of a chart, its rule and its x axis included."""


def profile_lines(
    node: str, profiles: Sequence[DeviceProfile], columns: int, rows: int, role: str, when: str
) -> list[Line]:
    """Return exactly `rows` lines: `profiles` are those of one kind, newest first; `when`: the time of the newest."""
    newest = profiles[0]
    title = [(0, "─ calibration ", "title"), (14, f" {node} ", role)]
    title.append((16 + len(node), f"{when} ", "label"))
    below = [*_facts(newest), *_slower(profiles)]
    charts = max(MIN_CHART_ROWS, min(rows - 1 - len(below), rows * 2 // 3))
    lines = [rule(columns, *title)]
    lines += beside(_charts(profiles, columns, charts - 1, role), columns, charts - 1)
    lines += [fit(one, columns) for one in below]
    return filled(lines, columns, rows)


def no_profile(node: str, columns: int, rows: int) -> list[Line]:
    """Return what there is to do without a profile."""
    text = f"{node} has no profile yet: trainctl calibrate RUN.toml --node {node}"
    return filled([line(Piece(text, "dim"))], columns, rows)


def _charts(profiles: Sequence[DeviceProfile], columns: int, rows: int, role: str) -> list[Block]:
    kinds: tuple[tuple[str, Callable[[Pass], float | None]], ...] = (
        ("samples/s by micro-batch", lambda one: one.rate),
        ("peak memory by micro-batch, GB", lambda one: None if one.peak_bytes is None else one.peak_bytes / 1e9),
    )
    return [
        draw_panel(_plot(title, profiles, value, role), width, rows)
        for (title, value), width in zip(kinds, widths(columns, 2), strict=True)
    ]


def _plot(title: str, profiles: Sequence[DeviceProfile], value: Callable[[Pass], float | None], role: str) -> Plot:
    shown = profiles[: EARLIER + 1]
    traces = [Trace(_window(one, value), "", "dim", sparse=True) for one in reversed(shown[1:])]
    traces.append(Trace(_window(shown[0], value), "", role, sparse=True))
    last = max(point.micro for profile in shown for point in profile.passes)
    return Plot(
        title,
        tuple(traces),
        1,
        max(last, 2),
        min_span=0.2,
        empty_text="n/a",
        crosshair=peak(shown[0].passes).micro,
    )


def _window(profile: DeviceProfile, value: Callable[[Pass], float | None]) -> Window:
    known = [(point.micro, found) for point in profile.passes if (found := value(point)) is not None]
    sizes = np.array([micro for micro, _ in known], np.int64)
    values = np.array([found for _, found in known], np.float64)
    return Window(1, sizes, values, values, values, np.ones(len(known)), values, np.zeros(len(known), np.int64))


def _facts(profile: DeviceProfile) -> list[Line]:
    best = peak(profile.passes)
    out = profile.out_of_memory_micro
    rows = [
        (
            f"{calibration_lines.PEAK_WORD} at {best.micro:,}",
            f"{number(best.rate)} samples/s, {gigabytes(best.peak_bytes)} GB"
            + (f"; out of memory at {out:,}" if out is not None else ""),
        ),
        *calibration_lines.part_lines(profile),
    ]
    return [line(Piece(f"{name:<18}", "label"), text) for name, text in rows]


def _slower(profiles: Sequence[DeviceProfile]) -> list[Line]:
    found = slower(profiles[1], profiles[0]) if len(profiles) > 1 else []
    return [line(Piece(f"slower: {one.what} {number(one.before)} → {number(one.now)}", "warning")) for one in found]
