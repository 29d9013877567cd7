"""The Overview: one run on one page."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.tui.commands.context import Values
from trainctl.tui.screens import fleet_table, overview_view
from trainctl.tui.screens.table_screen import TableScreen
from trainctl.tui.state import table_schemas
from trainctl.tui.state.rank_rows import Row, rows
from trainctl.tui.text.styled_line import Line

_NOTHING: tuple[tuple[int, int], list[Line]] = (0, 0), []


class OverviewScreen(TableScreen):
    """One run on one page."""

    TABLE = table_schemas.FLEET
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "choose(1)", "next node", show=False),
        Binding("up,k", "choose(-1)", "previous node", show=False),
        Binding("enter", "app.node", "open the node", show=False, tooltip="the chosen node in full"),
        Binding("right", "open_node(True)", "open a node", show=False, tooltip="a row for each rank"),
        Binding("left", "open_node(False)", "close a node", show=False, tooltip="one row for the node"),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._charts = overview_view.ChartCache()
        self.opened: frozenset[str] = frozenset()
        self._ready = _NOTHING  # drawn in parts, to be shown

    @property
    def wanted(self) -> fleet_table.Arrangement:
        """Return the fleet table as it was filtered, sorted and opened."""
        owner, bar = self.owner, self.bar
        bar.table = table_schemas.fleet(owner.shown.own_metrics)
        return fleet_table.Arrangement(bar.filter, self.order, self.opened, owner.fleet_metrics, bar.table)

    def painting(self) -> Iterator[None]:
        """Return each part of the page by itself, and all of them shown together at the end; given up where the screen
        is painted meanwhile, which is newer."""
        columns, rows = self.size
        if self.is_whole and overview_view.too_small(columns, rows) is None:
            room, number = (columns, self._body_rows()), self.paints
            made: list[Line] = []
            for part in self._parts(*room):
                made += part
                yield
                if not self.is_whole or self.paints != number:
                    return
            self._ready = room, made
        self.paint()
        yield

    def lines(self, columns: int, rows: int) -> list[Line]:
        (room, drawn), self._ready = self._ready, _NOTHING
        if room != (columns, rows):
            drawn = [pieces for part in self._parts(columns, rows) for pieces in part]
        return drawn

    def _parts(self, columns: int, rows: int) -> Iterator[list[Line]]:
        owner = self.owner
        self.filter_rows(self._rows() if self.bar.rows else [])
        return overview_view.parts(
            owner.shown,
            owner.clock,
            columns,
            rows,
            selected=owner.selected,
            badge=owner.badge,
            address=owner.address,
            cache=self._charts,
            wanted=self.wanted,
        )

    def _rows(self) -> list[Row]:
        return rows(self.owner.shown, self.owner.clock, self.owner.selected)

    @property
    def _chosen(self) -> Row | None:
        return next((row for row in self._rows() if row.selected), None)

    def sort_fields(self) -> Sequence[str]:
        return fleet_table.sortable(self.owner.shown, self.owner.clock, self.size.width, self.owner.fleet_metrics)

    def action_choose(self, by: int) -> None:
        """Move the choice among the rows; dialogs start from the chosen one."""
        rank = fleet_table.rank_at(fleet_table.arranged(self._rows(), self.wanted), by)
        if rank is not None:
            self.owner.selected = rank
        self.paint()

    def action_open_node(self, wide: bool) -> None:
        """Open the chosen node into its ranks, or closes it."""
        row = self._chosen
        if row is not None:
            self.opened = self.opened | {row.view.node} if wide else self.opened - {row.view.node}
            self.paint()

    def action_toggle_node(self, rank: int) -> None:
        """Open or close a node of several ranks that was clicked."""
        node = next((row.view.node for row in self._rows() if row.view.rank == rank), "")
        self.opened ^= {node}
        self.paint()

    def values(self) -> Values:
        """Return what `y` copies of the chosen node, or else of the run."""
        row, node = self._chosen, self.owner.shown.node
        if row is None:
            return super().values()
        rate = f"{row.own_rate:.1f}" if row.own_rate is not None else ""
        address = node.address if node is not None and node.node == row.view.node else ""
        pid = str(row.view.pid) if row.view.pid is not None else ""
        texts = ("address", address), ("own tok/s", rate), ("pid", pid), ("why", row.view.why)
        return (("node", row.view.node), *((name, text) for name, text in texts if text), *super().values())
