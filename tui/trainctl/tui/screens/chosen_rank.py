"""What screens of one node share: the rank that is chosen, and the keys to the next."""

from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.state.rank_rows import Row, rows


class ChosenRankScreen(BaseScreen):
    """Loads more of what it shows when it is opened, and after each attachment."""

    def on_screen_resume(self) -> None:
        super().on_screen_resume()
        self.reload()

    def arrived(self) -> None:
        self.reload()

    def reload(self) -> None:
        """Ask for what the view of the run doesn't have."""

    @property
    def row(self) -> Row | None:
        """The rank that is chosen, or the first."""
        owner = self.owner
        table = rows(owner.shown, owner.clock, owner.selected)
        return next((row for row in table if row.selected), table[0] if table else None)

    def action_turn(self, by: int) -> None:
        """To the next node, round the ends."""
        run, row = self.owner.shown.run, self.row
        if run is None or row is None:
            return
        ranks = sorted(view.rank for view in run.ranks)
        self.owner.selected = ranks[(ranks.index(row.view.rank) + by) % len(ranks)]
        self.turned()
        self.paint()

    def turned(self) -> None:
        """Another rank is chosen."""
