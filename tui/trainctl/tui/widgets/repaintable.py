"""What the program brings up to date when its state has changed."""

from collections.abc import Iterator


class Repaintable:
    """What `paint` of the program brings up to date: screens, and dialogs that show the present state."""

    def paint(self) -> None:
        """Shows the present state."""
        raise NotImplementedError

    def painting(self) -> Iterator[None]:
        """As `paint`, in parts, between which others may have a turn."""
        self.paint()
        yield
