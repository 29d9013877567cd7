"""The split of the global batch over the nodes, as a person edits it in the dialog; what it would do is the lead's to
say. Pure.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainctl.protocol.analysis.straggler import waits
from trainctl.protocol.batch.split import apportion
from trainctl.protocol.config.objectives import SAMPLES
from trainctl.protocol.messages import DryRun, RankForecast
from trainctl.protocol.messages.events import SharesChanged
from trainctl.tui.commands.forms import few
from trainctl.tui.state.run_events import took_effect
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.styled_line import clean

_TYPED = re.compile(r"\d{1,7}%?")


@dataclass(frozen=True)
class Seat:
    """One live node: its share in the plan, and what its last step measured; what isn't known is None."""

    node: str
    share: int
    micro_batch: int  # that is set; a smaller share is run in one pass
    rank: int = 0
    rate: float | None = None  # samples per second of data, forward and backward
    seconds: float | None = None  # of a step, without waits for others
    memory_bytes: float | None = None  # peak
    memory_cap_bytes: float | None = None


def seats_of(state: ViewState) -> tuple[Seat, ...]:
    """Return the run's live ranks that have a share."""
    seats, waited = [], waits({rank: seen.value for rank, seen in state.ranks.items()})
    for view in state.run.live_ranks if state.run else ():
        if view.share is None:
            continue
        seen, micro = state.ranks.get(view.rank), max(view.micro_set or view.micro_batch or 0, 1)
        if seen is None:
            seats.append(Seat(view.node, view.share, micro, view.rank))
            continue
        step, busy = seen.value, seen.value.phases.busy
        rate = step.samples / busy if busy > 0 and step.samples else None
        memory = step.peak_or_held_bytes, step.memory_cap_bytes
        seconds = step.step_seconds - waited.get(view.rank, 0.0)
        seats.append(Seat(view.node, view.share, micro, view.rank, rate, seconds, *memory))
    return tuple(seats)


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
    is_auto: bool = False  # the lead is to choose shares, and micro-batches where it may
    forecast: DryRun | None = None  # the newest one; of these shares only if `foreseen` has it

    @property
    def total(self) -> int:
        """Return the global batch."""
        return sum(seat.share for seat in self.seats)

    @property
    def changed(self) -> bool:
        """Return whether shares or micro-batches differ from the plan's."""
        return self.is_auto or self.shares != tuple(seat.share for seat in self.seats)

    @property
    def args(self) -> dict[str, Any]:
        """Return what `rebalance` takes: every live node's share, or that the lead is to choose."""
        if self.is_auto:
            return {"auto": True}
        return {"shares": {seat.node: share for seat, share in zip(self.seats, self.shares, strict=True)}}

    @property
    def foreseen(self) -> DryRun | None:
        """Return what the lead says that these shares would do; None while that isn't known."""
        said = self.forecast
        return said if said is not None and not said.refused and _shares_of(said, self.seats) == self.shares else None

    def rank_of(self, seat: Seat) -> RankForecast | None:
        """Return what the lead says of a node whose settings would change."""
        ranks = self.foreseen.ranks if self.foreseen is not None else ()
        return next((one for one in ranks if one.rank == seat.rank), None)

    @property
    def micros_changed(self) -> str:
        """Return the micro-batches that the lead would choose with these shares; empty if none."""
        said = {seat: one for seat in self.seats if (one := self.rank_of(seat)) is not None and _is_chosen(seat, one)}
        parts = [f"{clean(seat.node)} {one.micro_before} → {one.micro}" for seat, one in said.items()]
        return f"micro-batch {few(parts)}" if parts else ""


def _shares_of(said: DryRun, seats: Sequence[Seat]) -> tuple[int, ...]:
    after = {one.rank: one.share or 0 for one in said.ranks}
    return tuple(after.get(seat.rank, seat.share) for seat in seats)


def _is_chosen(seat: Seat, one: RankForecast) -> bool:
    """Return whether another micro-batch comes with the share, than the one that is set."""
    return one.micro is not None and one.share is not None and one.micro != min(seat.micro_batch, one.share)


def foresee(split: Split, said: DryRun | None) -> Split:
    """Return the split with the lead's answer about it, None if there was none. What the lead has chosen is sent as
    shares if no micro-batch comes with them: then it is done as it is shown."""
    if not split.is_auto:
        return replace(split, forecast=said)
    if said is None or said.refused:
        problem = said.refused if said is not None else "the run's lead doesn't answer"
        return replace(split, is_auto=False, problem=problem)
    after = {one.rank: one for one in said.ranks}
    is_auto = any(_is_chosen(seat, after[seat.rank]) for seat in split.seats if seat.rank in after)
    return replace(split, shares=_shares_of(said, split.seats), is_auto=is_auto, forecast=said)


def former(state: ViewState, seats: Sequence[Seat]) -> tuple[int, ...]:
    """Return the shares before the last rebalance that was applied, if they are of these nodes and this global
    batch."""
    done = (event for event in reversed(state.run_events) if event.verb == "rebalance" and event.outcome == "applied")
    event = next((event for event in done if took_effect(event)), None)
    return former_of(event.data.before, seats) if event and isinstance(event.data, SharesChanged) else ()


def former_of(shares: Mapping[str, int], seats: Sequence[Seat]) -> tuple[int, ...]:
    """Return these shares in the order of the seats; none unless they are of exactly these nodes and of the same
    sum."""
    found = {node: count for node, count in shares.items() if count}
    if set(found) != {seat.node for seat in seats} or sum(found.values()) != sum(seat.share for seat in seats):
        return ()
    return tuple(found[seat.node] for seat in seats)


def opened(state: ViewState, rank: int | None = None) -> Split:
    """Return the plan's own split, the node of `rank` chosen."""
    seats = seats_of(state)
    ranks = [seat.rank for seat in seats]
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
    return replace(split, shares=tuple(shares), moves=moves, is_auto=False)


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
    made = replace(split, typed=text, before_typing=before, shares=before, problem="", moves=(), is_auto=False)
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
    """Return the split that the lead is to choose; `foresee` then has it."""
    return replace(_settled(split), is_auto=True)


def undo(split: Split) -> Split:
    """Return the plan's shares; where they stand already, those before the last rebalance."""
    was_changed, split = split.changed, replace(_settled(split), is_auto=False)
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
    """Return the seconds of a share at the node's own rate, about; the share where that isn't known."""
    return (share / seat.rate if seat.rate else 0.0, share)
