"""Calibration: the chosen node's rate and memory over the micro-batch, and what its machine's parts can do."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol.calibration.peak import is_comparable
from trainctl.protocol.calibration.profile import DeviceProfile
from trainctl.protocol.errors import TrainctlError
from trainctl.tui.screens import calibration_view
from trainctl.tui.screens.chosen_rank import ChosenRankScreen
from trainctl.tui.text import formatting as fmt
from trainctl.tui.text.styled_line import Line
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
        """Asks the node's agent for its profiles: when it is opened, and after each attachment."""
        self.run_worker(self._load(), group="profiles", exclusive=True)

    async def _load(self) -> None:
        client, row = self.owner.client, self.row
        if client is None or row is None:
            return
        try:
            found = (await client.profiles(row.view.node)).profiles
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
            return [self.head(columns), *calibration_view.nothing(node or "NODE", columns, rows - 1)][:rows]
        when = fmt.clock(profiles[0].created_at, owner.clock.wall(), owner.clock.zone)
        role = rank_role(row.place)
        body = calibration_view.lines(node, profiles, columns, rows - 1, owner.glyphs, role, when)
        return [self.head(columns), *body][:rows]

    def turned(self) -> None:
        self.reload()
