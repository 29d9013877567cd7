"""Panels next to each other under one rule, and the panels of one node. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainctl.tui import lines as ln
from trainctl.tui.charts import catalogue
from trainctl.tui.charts import panel as p
from trainctl.tui.charts.marks import Mark
from trainctl.tui.generations import Change
from trainctl.tui.glyphs import Glyphs
from trainctl.tui.model import ViewState


@dataclass(frozen=True)
class Steps:
    """What panels of the last steps span, with the marks to draw in them."""

    first: int
    last: int
    marks: tuple[Mark | Change, ...] = ()


def side_by_side(panels: Sequence[p.Panel], columns: int, room: int, glyphs: Glyphs) -> list[ln.Line]:
    """The panels in exactly `room` lines of `columns` cells, each as wide as the others."""
    if room < 2 or not panels:
        return [ln.fit((), columns)] * max(room, 0)
    widths = _widths(columns, len(panels))
    drawn = [p.draw(item, size, room - 1, glyphs) for item, size in zip(panels, widths, strict=True)]
    labels: list[tuple[int, str, str]] = []
    start = 0
    for index, ((_, own), size) in enumerate(zip(drawn, widths, strict=True)):
        if index:
            labels.append((start - 1, glyphs.tee, "rule"))
        labels += [(start + at, text, role) for at, text, role in own]
        start += size + 1
    made = [ln.rule(columns, glyphs.horizontal, *labels)]
    for row in range(room - 1):
        pieces: list[ln.Piece] = []
        for index, ((body, _), size) in enumerate(zip(drawn, widths, strict=True)):
            pieces += [ln.Piece(glyphs.vertical, "rule")] if index else []
            pieces += ln.fit(body[row], size)
        made.append(ln.fit(pieces, columns))
    return made


def _widths(columns: int, panels: int) -> list[int]:
    room = columns - (panels - 1)
    sizes = [room // panels] * panels
    sizes[0] += room - sum(sizes)
    return sizes


def node_panel(state: ViewState, rank: int, metrics: Sequence[str], steps: Steps) -> p.Panel:
    """The last steps of some metrics of one rank, or of the run where they aren't kept by rank; they share one y axis,
    whose unit is the first one's."""
    known = [catalogue.metric_of(name) for name in metrics]
    tracks = tuple(
        p.Track(
            catalogue.in_units(state.lately(name, rank if catalogue.per_rank(name) else None), known[0].factor),
            catalogue.short(name) if len(metrics) > 1 else "",
            f"series{index % 8}",
            letter="abcdefgh"[index % 8],
        )
        for index, name in enumerate(metrics)
    )
    return p.Panel(
        ", ".join(metric.title for metric in known),
        tracks,
        steps.first,
        steps.last,
        steps.marks,
        least_span=max((metric.least_span for metric in known), default=0.02),
        most_times=max((metric.most_times for metric in known), default=math.inf),
    )
