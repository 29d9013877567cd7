"""The split dialog as lines: a row a node with its samples and what they would cost, and what all of it would change.

A click on `-`, `+` or a node does what the keys do.
"""

from trainctl.tui import format as f
from trainctl.tui.bars import share_bar
from trainctl.tui.glyphs import Glyphs
from trainctl.tui.lines import Line, Piece, clean, fit, line, pad_left, shorten
from trainctl.tui.shares import Seat, group_seconds
from trainctl.tui.split import Split

CELLS = 70
"""Width of every line."""
_NODE, _BAR = 12, 12
_HEAD = f"{'':2}{'NODE':{_NODE}}{'SAMPLES':>11} {'PART':>5} {'':{_BAR}}{'OWN/S':>7}{'STEP':>9}{'MEM GB':>10}"


def rows(split: Split, room: int, glyphs: Glyphs) -> list[Line]:
    """The table with its sum; of more nodes than `room` those around the chosen one."""
    first = min(max(split.chosen - room + 1, 0), max(len(split.seats) - room, 0))
    made = [fit(line(Piece(_HEAD, "label")), CELLS)]
    made += [_row(split, index, glyphs) for index in range(first, min(first + room, len(split.seats)))]
    return [*made, _sum(split, glyphs)]


def _row(split: Split, index: int, glyphs: Glyphs) -> Line:
    seat, share = split.seats[index], split.shares[index]
    chosen = index == split.chosen
    name = shorten(clean(seat.node), _NODE - 1, glyphs.ellipsis)
    typing = chosen and split.typed
    number = f"{split.typed}_" if typing else str(share)
    role = "bad" if typing and split.problem else "strong" if share == seat.share else "accent"
    part = share / split.total if split.total else 0.0
    return fit(
        (
            Piece(glyphs.cursor.ljust(2) if chosen else "  ", "key"),
            Piece(name.ljust(_NODE), "cursor" if chosen else "text", f"screen.pick({index})"),
            Piece(" - ", "key", f"screen.give({index}, -1)"),
            *pad_left((Piece(number, role),), 5),
            Piece(" + ", "key", f"screen.give({index}, 1)"),
            Piece(f" {f.percent(part):>5} ", "label"),
            *fit((share_bar(part, _BAR - 1, glyphs),), _BAR),
            Piece(f"{_rate(seat):>7}", "text"),
            *pad_left(_seconds(split, index), 9),
            *pad_left(_memory(seat, share), 10),
        ),
        CELLS,
    )


def _rate(seat: Seat) -> str:
    rate = seat.samples_per_second
    return f.NA if rate is None else f"{rate:.2f}" if rate < 9.95 else f"{rate:.1f}" if rate < 99.5 else f"{rate:.0f}"


def _seconds(split: Split, index: int) -> Line:
    """Of the node; the slowest one's, which the group takes, stands out."""
    seconds = split.seats[index].seconds(split.shares[index])
    slowest = seconds is not None and seconds == group_seconds(split.seats, split.shares)
    return line(Piece(f.seconds(seconds), "dim" if seconds is None else "strong" if slowest else "text"))


def _memory(seat: Seat, share: int) -> Line:
    """As measured; a share below the micro-batch needs that or less."""
    if seat.memory_bytes is None:
        return line(Piece(f.NA, "dim"))
    used = f.used_of(seat.memory_bytes, seat.memory_cap_bytes)
    return line(Piece(f"≤{used}" if seat.frees_memory(share) else used))


def _sum(split: Split, glyphs: Glyphs) -> Line:
    now, then = (group_seconds(split.seats, shares) for shares in (_plan(split), split.shares))
    text = f"step {f.seconds(now)}" if now is not None else "step n/a until each node has measured one"
    if split.changed and now and then:
        text = f"step {f.seconds(now)} {glyphs.arrow} {f.seconds(then)}, {100 * (now / then - 1):+.0f}% samples/s"
    total = f"{sum(split.shares)} of {split.total}"
    return fit(line(Piece(f"{'':2}{'together':{_NODE}}{total:>11}", "label"), "   ", Piece(text, "strong")), CELLS)


def _plan(split: Split) -> tuple[int, ...]:
    return tuple(seat.share for seat in split.seats)


def keys_line(glyphs: Glyphs) -> Line:
    """What the keys do; a click on one does it."""
    hints = (
        (f"{glyphs.up}{glyphs.down}" if not glyphs.ascii_only else "j k", " node", ""),
        ("-+", " move", ""), ("0-9 %", " type", ""), ("a", " auto", "screen.auto"), ("u", " undo", "screen.undo"),
        ("enter", " sends", "screen.send"), ("esc", " closes", "screen.close"),
    )  # fmt: skip
    made: list[Piece] = []
    for key, words, action in hints:
        made += [Piece("  " if made else ""), Piece(key, "key", action), Piece(words, "label", action)]
    return line(*made)
