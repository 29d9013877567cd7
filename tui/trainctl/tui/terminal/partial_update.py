"""What has changed in lines on screen, written to the terminal straight from them, past Textual's composition.

That renders every widget that a change touches, cuts all its lines at each edge of any other, and puts them together
again: for some sixty short stretches of a repaint it costs several times what making them does. Whatever isn't a plain
line in full view (a field, a notice above it, a wide character) is left to Textual.
"""

from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from textual._compositor import Compositor, CompositorUpdate
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from trainctl.tui.terminal.spans import write
from trainctl.tui.widgets.line_view import Lines


class Stretch(NamedTuple):
    """Cells of one row of the screen, and what is in them."""

    row: int
    column: int
    segments: list[Segment]


class StretchUpdate(CompositorUpdate):
    """Stretches as Textual writes an update."""

    def __init__(self, stretches: list[Stretch]) -> None:
        self.stretches = stretches

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for _, _, segments in self.stretches:
            yield from segments

    def render_segments(self, console: Console) -> str:
        """The terminal's sequences for all of them."""
        return write(self.stretches, console)


def take(screen: Screen[None]) -> StretchUpdate | None:
    """What can be written straight of the screen's changes, which then are no longer Textual's to write; None where
    there is nothing of that kind."""
    compositor = screen._compositor
    changed = compositor._dirty_regions
    if not changed or screen.size.region in changed or screen.app.is_inline:
        return None
    above = [(widget, region, region.intersection(clip)) for widget, (region, clip) in _shown(compositor)]
    plain = {widget: widget for widget, _, _ in above if isinstance(widget, Lines) and _plain(widget)}
    own: dict[Region, tuple[Lines, Region]] = {}
    for region in changed:
        found = next(((widget, whole, seen) for widget, whole, seen in above if seen.overlaps(region)), None)
        if found is not None and found[0] in plain and found[2].contains_region(region):
            own[region] = plain[found[0]], found[1]
    made: list[Stretch] = []
    high = [region for region in own if region.height > 1]  # such as a whole widget, of which single rows changed too
    for region in [row for row in own if any(row != whole and whole.contains_region(row) for whole in high)]:
        del own[region]
        changed.discard(region)
    for region in sorted(own, key=lambda region: (region.y, region.x)):
        stretches = _stretches(region, *own[region])
        if stretches is not None:
            made += stretches
            changed.discard(region)
    return StretchUpdate(made) if made else None


def _shown(compositor: Compositor) -> Iterable[tuple[Widget, tuple[Region, Region]]]:
    """From the front to the back."""
    return compositor.visible_widgets.items()


def _plain(widget: Lines) -> bool:
    """Whether nothing but its lines is seen of it."""
    return widget.opacity == 1.0 and widget.content_region == widget.region and not widget.hover_style._link_id


def _stretches(region: Region, widget: Lines, whole: Region) -> list[Stretch] | None:
    """The rows of a changed region of a widget; None where one has wide characters."""
    made = []
    for row in region.line_range:
        cells = widget.cells(row - whole.y, region.x - whole.x, region.width)
        if cells is None:
            return None
        made.append(Stretch(row, region.x, [Segment(text, _filtered(style, widget)) for text, style in cells]))
    return made


def _filtered(style: Style, widget: Lines) -> Style:
    """A style as the app's filters, of colours for one, leave it; told by the widget from then on."""
    known = widget.filtered.get(style)
    if known is None:
        strip = Strip([Segment("x", style)], 1)
        for line_filter in widget.get_line_filters():
            strip = strip.apply_filter(line_filter, widget.background_colors[1])
        known = widget.filtered[style] = next(iter(strip)).style or style
    return known
