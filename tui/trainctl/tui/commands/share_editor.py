"""The split of the global batch over the nodes, as a person edits it in the dialog: pure, so that it can be tested."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainctl.protocol.batch.split import apportion
from trainctl.protocol.config.objectives import SAMPLES
from trainctl.tui.commands.forecast import few
from trainctl.tui.commands.shares import Seat, fastest, former, seats_of, with_micros
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.styled_line import clean

_TYPED = re.compile(r"\d{1,7}%?")


@dataclass(frozen=True)
class Split:
    """Shares being edited; they always sum to the global batch, each at least 1. `typed` is a number on its way in."""

    seats: tuple[Seat, ...]
    shares: tuple[int, ...]
    chosen: int = 0
    typed: str = ""
    before_typing: tuple[int, ...] = ()
    problem: str = ""  # why what is typed can't be
    moves: tuple[tuple[int, int], ...] = ()  # (other node, samples from it) since the node was chosen, for going back
    unit: str = SAMPLES  # what the samples of the batch are called
    former: tuple[int, ...] = ()  # the shares before the last rebalance, where they are known
    micros: tuple[int, ...] = ()  # micro-batches that were chosen with the shares; empty: they stay

    @property
    def total(self) -> int:
        """Return the global batch."""
        return sum(seat.share for seat in self.seats)

    @property
    def changed(self) -> bool:
        """Return whether shares or micro-batches differ from the plan's."""
        return bool(self.micros) or self.shares != tuple(seat.share for seat in self.seats)

    @property
    def after(self) -> tuple[Seat, ...]:
        """Return the nodes, with the micro-batches that they are to have."""
        return with_micros(self.seats, self.micros) if self.micros else self.seats

    @property
    def args(self) -> dict[str, Any]:
        """Return what `rebalance` takes: every live node's share; the agent chooses them if it is to choose
        micro-batches."""
        if self.micros:
            return {"auto": True}
        return {"shares": {seat.node: share for seat, share in zip(self.seats, self.shares, strict=True)}}


def opened(state: ViewState, rank: int | None = None) -> Split:
    """Return the plan's own split, the node of `rank` chosen."""
    seats = seats_of(state)
    ranks = [view.rank for view in (state.run.live_ranks if state.run else ())]
    shares = tuple(seat.share for seat in seats)
    unit = state.run.sample_unit if state.run is not None else SAMPLES
    return Split(seats, shares, ranks.index(rank) if rank in ranks else 0, former=former(state, seats), unit=unit)


def choose(split: Split, by: int) -> Split:
    """Choose another node; a number typed for the one before stays as far as it was possible."""
    place = min(max(split.chosen + by, 0), max(len(split.seats) - 1, 0))
    return replace(_settled(split), chosen=place) if place != split.chosen or split.typed else split


def move(split: Split, by: int) -> Split:
    """Move `by` samples to (or, below 0, from) the chosen node, one by one: from the node that is slowest then, or to
    the fastest one, as far as that goes. Moving back takes the same way."""
    moves = () if split.typed else split.moves
    split, step = _settled(split), 1 if by > 0 else -1
    shares = list(split.shares)
    for _ in range(abs(by)):
        back = bool(moves) and moves[-1][1] == -step
        other = moves[-1][0] if back else _giver(split, shares) if by > 0 else _taker(split, shares)
        if other is None:
            break
        moves = moves[:-1] if back else (*moves, (other, step))
        shares[split.chosen] += step
        shares[other] -= step
    return replace(split, shares=tuple(shares), moves=moves, micros=())


def type_key(split: Split, key: str) -> Split:
    """Return a digit, `%` or `backspace` for the chosen node; the others share the rest in the proportion they had.

    What can't be had leaves the shares as they were before, and says why in `problem`.
    """
    before = split.before_typing if split.typed else split.shares
    text = split.typed[:-1] if key == "backspace" else split.typed + key
    if key != "backspace" and not _TYPED.fullmatch(text):
        return split
    if not text:
        return replace(split, typed="", problem="", shares=before, before_typing=())
    made = replace(split, typed=text, before_typing=before, shares=before, problem="", moves=(), micros=())
    wanted = round(split.total * int(text[:-1]) / 100) if text.endswith("%") else int(text)
    most = split.total - (len(split.seats) - 1)
    if wanted < 1:
        least = f"each node needs at least 1 {split.unit.removesuffix('s')}"
        return replace(made, problem=f"{least}; use drain to take a node out")
    if len(split.seats) == 1 and wanted < most:
        return replace(made, problem=f"the only node takes all {most} {split.unit}")
    if wanted > most:
        return replace(made, problem=f"{split.seats[split.chosen].node} can take at most {most} of {split.total}")
    return replace(made, shares=_around(before, split.chosen, wanted))


def auto(split: Split) -> Split:
    """Return the shares of the shortest step by the nodes' own speeds, with the micro-batches that are chosen with
    them; a problem if a speed isn't known yet."""
    made = fastest(split.seats)
    if made is None:
        return replace(_settled(split), problem="own rates aren't measured yet")
    in_force = zip(split.seats, made.shares, made.micros, strict=True)
    is_new = any(min(micro, share) != min(seat.micro_batch, share) for seat, share, micro in in_force)
    return replace(_settled(split), shares=made.shares, micros=made.micros if is_new else ())


def undo(split: Split) -> Split:
    """Return the plan's shares; where they stand already, those before the last rebalance."""
    was_changed, split = split.changed, replace(_settled(split), micros=())
    if was_changed:
        return replace(split, shares=tuple(seat.share for seat in split.seats))
    if not split.former:
        return replace(split, problem="no earlier split of this global batch is known")
    return replace(split, shares=split.former)


def _settled(split: Split) -> Split:
    return replace(split, typed="", problem="", before_typing=(), moves=())


def _around(shares: tuple[int, ...], chosen: int, wanted: int) -> tuple[int, ...]:
    others = {index: float(share) for index, share in enumerate(shares) if index != chosen}
    rest = apportion(sum(shares) - wanted, others) if others else {}
    return tuple(rest.get(index, wanted) for index in range(len(shares)))


def _giver(split: Split, shares: Sequence[int]) -> int | None:
    able = [index for index, share in enumerate(shares) if index != split.chosen and share > 1]
    return max(able, key=lambda index: _load(split.seats[index], shares[index]), default=None)


def _taker(split: Split, shares: Sequence[int]) -> int | None:
    if shares[split.chosen] <= 1:
        return None
    others = [index for index in range(len(shares)) if index != split.chosen]
    return min(others, key=lambda index: _load(split.seats[index], shares[index] + 1), default=None)


def _load(seat: Seat, share: int) -> tuple[float, int]:
    seconds = seat.seconds(share)
    return (seconds if seconds is not None else 0.0, share)


def micros_changed(before: Sequence[Seat], after: Sequence[Seat], wanted: Sequence[int]) -> str:
    """Return the micro-batches in force that change with these shares; empty if none of them was chosen."""
    parts = [
        f"{clean(old.node)} {old.micro_in_force} → {min(new.micro_batch, share)}"
        for old, new, share in zip(before, after, wanted, strict=True)
        if new.micro_batch != old.micro_batch and min(new.micro_batch, share) != old.micro_in_force
    ]
    return f"micro-batch {few(parts)}" if parts else ""
