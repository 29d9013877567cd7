"""The split dialog as lines: a row a node with its samples and what they would cost, and what all of it would change.

A click on `-`, `+` or a node does what the keys do.
"""

from trainctl.tui.commands.share_editor import Split
from trainctl.tui.commands.shares import Seat, group_seconds, memory_at
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import Line, Piece, clean, fit, groups, line, pad_left, shorten, width
from trainctl.tui.widgets.inline_bars import share_bar

CELLS = 70
"""Width of every line, where there is room."""
_NODE, _BAR = 12, 12
_OTHERS = CELLS - _NODE - _BAR


def cells_in(columns: int) -> int:
    """Width of every line in so many columns."""
    return min(CELLS, max(columns, _OTHERS + 6))


def _widths(cells: int) -> tuple[int, int]:
    """Of the names and of the bars, which go first."""
    return (_NODE, _BAR) if cells >= CELLS else (min(cells - _OTHERS, _NODE), 0)


def rows(split: Split, room: int, glyphs: Glyphs, cells: int = CELLS) -> list[Line]:
    """The table with its sum; of more nodes than `room` those around the chosen one."""
    first = min(max(split.chosen - room + 1, 0), max(len(split.seats) - room, 0))
    name, bar = _widths(cells)
    head = f"{'':2}{'NODE':{name}}{'SAMPLES':>11} {'PART':>5} {'':{bar}}{'OWN/S':>7}{'STEP':>9}{'MEM GB':>10}"
    made = [fit(line(Piece(head, "label")), cells)]
    made += [_row(split, index, glyphs, cells) for index in range(first, min(first + room, len(split.seats)))]
    return [*made, _sum(split, glyphs, cells)]


def _row(split: Split, index: int, glyphs: Glyphs, cells: int) -> Line:
    room, bar = _widths(cells)
    seat, share = split.seats[index], split.shares[index]
    chosen = index == split.chosen
    name = shorten(clean(seat.node), room - 1, glyphs.ellipsis)
    typing = chosen and split.typed
    number = f"{split.typed}_" if typing else str(share)
    role = "bad" if typing and split.problem else "strong" if share == seat.share else "accent"
    part = share / split.total if split.total else 0.0
    pieces = (
        Piece(glyphs.cursor.ljust(2) if chosen else "  ", "key"),
        Piece(name.ljust(room), "cursor" if chosen else "text", f"screen.pick({index})"),
        Piece(" - ", "key", f"screen.give({index}, -1)"), *pad_left((Piece(number, role),), 5),
        Piece(" + ", "key", f"screen.give({index}, 1)"), Piece(f" {f.percent(part):>5} ", "label"),
        *fit((share_bar(part, bar - 1, glyphs),), bar), Piece(f"{_rate(seat):>7}", "text"),
        *pad_left(_seconds(split, index), 9), *pad_left(_memory(split.after[index], share, glyphs), 10),
    )  # fmt: skip
    return fit(pieces, cells)


def _rate(seat: Seat) -> str:
    rate = seat.samples_per_second
    return f.NA if rate is None else f"{rate:.2f}" if rate < 9.95 else f"{rate:.1f}" if rate < 99.5 else f"{rate:.0f}"


def _seconds(split: Split, index: int) -> Line:
    """Of the node; the slowest one's, which the group takes, stands out."""
    seconds = split.after[index].seconds(split.shares[index])
    slowest = seconds is not None and seconds == group_seconds(split.after, split.shares)
    return line(Piece(f.seconds(seconds), "dim" if seconds is None else "strong" if slowest else "text"))


def _memory(seat: Seat, share: int, glyphs: Glyphs) -> Line:
    """As measured, or as predicted for a micro-batch that wasn't in use; a smaller one needs at most so much."""
    found = memory_at(seat, share, seat.micro_batch)
    if found is None:
        return line(Piece(f.NA, "dim"))
    used = f.used_of(found.bytes, found.cap_bytes)
    return line(Piece(glyphs.text(f"≤{used}") if found.at_most else used))


def _sum(split: Split, glyphs: Glyphs, cells: int) -> Line:
    plan = tuple(seat.share for seat in split.seats)
    now, then = group_seconds(split.seats, plan), group_seconds(split.after, split.shares)
    text = f"step {f.seconds(now)}" if now is not None else "step n/a until each node has measured a step"
    if split.changed and now and then:
        text = f"step {f.seconds(now)} {glyphs.arrow} {f.seconds(then)}, {100 * (now / then - 1):+.0f}% {split.unit}/s"
    total = f"{sum(split.shares)} of {split.total}"
    head = f"{'':2}{shorten('together', _widths(cells)[0], ''):{_widths(cells)[0]}}{total:>11}"
    return fit(line(Piece(head, "label"), "   ", Piece(text, "strong")), cells)


def keys_lines(glyphs: Glyphs, cells: int = CELLS) -> list[Line]:
    """What the keys do, in one line or two; a click on one does it."""
    hints = (
        (f"{glyphs.up}{glyphs.down}" if not glyphs.ascii_only else "j k", " node", ""),
        ("-+", " move", ""), ("0-9 %", " type", ""), ("a", " auto", "screen.auto"), ("u", " undo", "screen.undo"),
        ("enter", " sends", "screen.send"), ("esc", " closes", "screen.close"),
    )  # fmt: skip
    parts = [line(Piece(key, "key", action), Piece(words, "label", action)) for key, words, action in hints]
    whole = groups(parts, sum(map(width, parts)) + 2 * len(parts))
    return [whole] if width(whole) <= cells else [groups(parts[:3], cells), groups(parts[3:], cells)]
