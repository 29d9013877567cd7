"""The split of the global batch: it sums to the batch, and shows and sends what the lead chooses."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.memory_values import memory
from tests.node_agent.support.simulation import Simulation, config, durable
from tests.tiers import scale
from tests.tui.support.recorded import BOOT, CLOCK, NOW, hung, rank_step, run_view, snapshot, under_way

from trainctl.node_agent.conductor import views
from trainctl.node_agent.conductor.views import dry_run
from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import Pass, ProfileSummary
from trainctl.protocol.messages.events import SharesChanged
from trainctl.tui.commands import arguments
from trainctl.tui.commands import forms as c
from trainctl.tui.commands import share_editor as sp
from trainctl.tui.commands.forms import preview
from trainctl.tui.state import rank_rows, reducer
from trainctl.tui.state import view_state as md
from trainctl.tui.state.view_state import ViewState


def state_of(view: m.RunView) -> md.ViewState:
    state = md.ViewState()
    for message in under_way(view):
        state = reducer.apply(state, message, CLOCK.at_monotonic)
    return state


MIXED = state_of(run_view(3))
FLEET = state_of(run_view(4, step=18_240, steps=60_000))
ALONE = state_of(run_view(1))
OPENED = sp.opened(MIXED)


def seats(*rates: tuple[int, float | None]) -> tuple[sp.Seat, ...]:
    return tuple(sp.Seat(f"n{index}", share, 8, index, rate) for index, (share, rate) in enumerate(rates))


rate = st.none() | st.floats(0.01, 1e4)
tables = st.lists(st.tuples(st.integers(1, 300), rate), min_size=1, max_size=16).map(lambda rows: seats(*rows))
keys = st.sampled_from([*"0123456789%", "backspace", "up", "down", "left", "right", "far", "auto", "undo"])


def press(split: sp.Split, key: str) -> sp.Split:
    match key:
        case "up" | "down":
            return sp.choose(split, -1 if key == "up" else 1)
        case "left" | "right" | "far":
            return sp.move(split, {"left": -1, "right": 1, "far": 1000}[key])
        case "auto":
            return sp.auto(split)
        case "undo":
            return sp.undo(split)
    return sp.type_key(split, key)


@given(tables, st.lists(keys, max_size=40))
def test_whatever_is_pressed_the_shares_sum_to_the_batch_and_none_is_empty(
    table: tuple[sp.Seat, ...], pressed: list[str]
) -> None:
    split = sp.Split(table, tuple(seat.share for seat in table))
    for key in pressed:
        split = press(split, key)
        assert sum(split.shares) == split.total
        assert min(split.shares) >= 1
        assert 0 <= split.chosen < len(table)
    shares = {seat.node: share for seat, share in zip(table, split.shares, strict=True)}
    assert split.args == ({"auto": True} if split.is_auto else {"shares": shares})


def test_a_seat_has_what_the_last_step_of_its_rank_measured() -> None:
    torch_a, _, mlx = OPENED.seats
    assert torch_a.rate == pytest.approx(5200 / 127, rel=0.01)
    step = rank_step(run_view(3), 118, 2)
    assert mlx.seconds == pytest.approx(step.step_seconds), "it waits for nobody"
    assert torch_a.seconds == pytest.approx(0.4 - 0.075, abs=0.001)
    assert (mlx.memory_bytes, mlx.memory_cap_bytes) == (step.peak_or_held_bytes, None)


def said(*ranks: tuple[int, int, int, int], **fields: Any) -> m.DryRun:
    """A lead's answer; by rank: shares and micro-batches before and after."""
    forecasts = tuple(
        m.RankForecast(rank=rank, node=f"n{rank}", share_before=8, share=share, micro_before=before, micro=after)
        for rank, share, before, after in ranks
    )
    return m.DryRun("r", "run", "rebalance", ranks=forecasts, **fields)


def test_the_lead_chooses_the_split_and_what_it_says_counts_only_for_the_shares_that_it_is_about() -> None:
    split = sp.Split(seats((8, 1.0), (8, 3.0), (8, None)), (8, 8, 8))
    asked = sp.auto(split)
    assert asked.changed and asked.args == {"auto": True}
    chosen = sp.foresee(asked, said((0, 4, 8, 4), (1, 12, 8, 8)))
    assert chosen.shares == (4, 12, 8) and chosen.args == {"shares": {"n0": 4, "n1": 12, "n2": 8}}
    assert chosen.rank_of(chosen.seats[1]) is not None and chosen.rank_of(chosen.seats[2]) is None
    assert sp.move(chosen, 1).foreseen is None and chosen.micros_changed == ""
    larger = sp.foresee(asked, said((0, 4, 8, 4), (1, 12, 8, 12)))
    assert larger.args == {"auto": True} and larger.micros_changed == "micro-batch n1 8 → 12"
    assert sp.move(larger, 1).args == {"shares": {"n0": 5, "n1": 11, "n2": 8}}
    refused = sp.foresee(asked, said(refused="own rates aren't measured yet"))
    assert refused.problem == "own rates aren't measured yet" and refused.shares == (8, 8, 8) and not refused.changed
    assert "doesn't answer" in sp.foresee(asked, None).problem
    assert sp.foresee(split, said(refused="no")).foreseen is None


def test_a_sample_comes_from_whoever_is_slowest_and_goes_to_whoever_is_fastest() -> None:
    split = sp.Split(seats((8, 10.0), (8, 1.0), (8, 5.0)), (8, 8, 8))
    assert sp.move(split, 1).shares == (9, 7, 8)
    assert sp.move(sp.choose(split, 1), -2).shares == (10, 6, 8)
    assert sp.move(split, -100).shares == (1, 8, 15)
    assert sp.move(split, 100).shares == (22, 1, 1)
    assert sp.move(sp.move(split, 5), -5) == split, "back the same way"
    alone = sp.Split(seats((8, 1.0)), (8,))
    assert sp.move(alone, 1).shares == (8,)


def test_a_number_is_taken_as_it_is_typed_and_what_cannot_be_is_refused_at_once() -> None:
    split = sp.Split(seats((16, 1.0), (9, 1.0), (39, 1.0)), (16, 9, 39))
    three = sp.type_key(split, "3")
    assert three.shares == (3, 11, 50)
    thirty = sp.type_key(three, "0")
    over = sp.type_key(thirty, "0")
    assert (over.shares, over.problem) == ((16, 9, 39), "n0 can take at most 62 of 64")
    assert sp.type_key(over, "backspace").shares == thirty.shares == (30, *thirty.shares[1:])
    assert "at least 1 sample" in sp.type_key(split, "0").problem
    assert sp.type_key(sp.type_key(sp.type_key(split, "5"), "0"), "%").shares[0] == 32
    assert sp.choose(over, 1).problem == ""


def test_undo_gives_the_plans_shares_and_then_the_former_ones() -> None:
    done = m.Event(
        id=9, at=NOW, severity="info", by="anna", run=run_view(3).run, step=100, verb="rebalance", outcome="applied",
        data=SharesChanged({"torch-a": 8, "torch-b": 8, "mlx-c": 8}, {"torch-a": 12, "torch-b": 10, "mlx-c": 2}),
        boot="boot-1", seq=MIXED.seq + 1,
    )  # fmt: skip
    split = sp.opened(reducer.apply(MIXED, done, CLOCK.at_monotonic), rank=2)
    assert split.chosen == 2
    moved = sp.move(split, 3)
    assert sp.undo(moved).shares == split.shares
    assert sp.undo(split).shares == (8, 8, 8)
    assert "no earlier split" in sp.undo(OPENED).problem
    even = {"torch-a": 8, "torch-b": 8}
    others = even, {**even, "mlx-c": 9}, {"torch-a": 12, "torch-b": 12, "mini": 0}, {}
    assert [sp.former_of(other, split.seats) for other in others] == [()] * 4


def test_a_new_lead_is_named_before_it_is_sent() -> None:
    piece = preview(arguments.parse("promote old_lead_is_off=true --node mlx-c"), MIXED)
    assert (piece.role, "leads instead of torch-a even without a majority" in piece.text) == ("strong", True)


def test_a_drained_node_has_no_seat_and_can_come_back() -> None:
    view = run_view(3)
    ranks = (*view.ranks[:2], msgspec.structs.replace(view.ranks[2], state="drained", share=0))
    state = state_of(msgspec.structs.replace(view, ranks=ranks))
    assert [seat.node for seat in sp.opened(state).seats] == ["torch-a", "torch-b"]
    assert c.form("admit", state).fields[0].choices == ("mlx-c",)
    assert "nothing to split" in c.form("rebalance", ALONE).blocked


def test_ranks_are_compared_over_the_newest_step_that_all_reported() -> None:
    ahead = msgspec.structs.replace(MIXED.ranks[0].value, step=119, boot=MIXED.boot, seq=MIXED.seq + 1)
    state = reducer.apply(MIXED, ahead, CLOCK.at_monotonic)
    assert {part.step for part in rank_rows.common_parts(state).values()} == {118}
    gone = msgspec.structs.replace(state, parts={**state.parts, 0: (ahead,)})
    assert rank_rows.common_parts(gone) == {}


def test_a_hung_rank_still_has_its_share_in_the_split() -> None:
    assert [seat.share for seat in sp.opened(state_of(hung(run_view(3), 1))).seats] == [12, 10, 2]


SEEDS = scale("splits on screen")
SIZES = (1, 2, 4, 8, 16)
MEGABYTE = 10**6
CAP = 100 * MEGABYTE


class Published(Simulation):
    """The conductor with its ranks; what an agent publishes of them is kept."""

    def __init__(self, nodes: tuple[str, ...], batch: int, chance: random.Random) -> None:
        kept = durable(nodes, batch)
        ranks = {
            rank: msgspec.structs.replace(of, micro_batch=chance.choice((2, 16)), auto_micro=chance.random() < 0.7)
            for rank, of in kept.settings.ranks.items()
        }
        settings = msgspec.structs.replace(kept.settings, ranks=ranks)
        super().__init__(config(batch=batch), msgspec.structs.replace(kept, settings=settings))
        self.published: list[m.RankStep] = []

    def _add_part(self, part: m.RankStep) -> None:
        super()._add_part(part)
        self.published.append(part)

    def seen(self) -> ViewState:
        """The program's state, attached now, with all steps since."""
        ranks = tuple(views.rank_view(self.conductor, rank, 1, "", None, 0.0) for rank in sorted(self.ranks))
        view = views.run_view(self.conductor, 0.0, "", ranks, "n0")
        state = reducer.apply(ViewState(), snapshot(msgspec.structs.replace(view, step=0)), CLOCK.at_monotonic)
        for seq, part in enumerate(self.published, 1):
            state = reducer.apply(state, msgspec.structs.replace(part, boot=BOOT, seq=seq), CLOCK.at_monotonic)
        return state


def calibrated(simulation: Published, chance: random.Random) -> None:
    """Curves, steps and memory that differ by rank; half of the ranks run out of memory with a larger micro-batch."""
    for rank in simulation.ranks.values():
        slope, a_pass, of_sample = chance.uniform(0.005, 0.03), chance.uniform(0.0, 0.1), chance.choice((1, 9))
        peaks = {micro: (10 + of_sample * micro) * MEGABYTE for micro in SIZES}
        passes = tuple(Pass(micro, a_pass + slope * micro, peaks[micro]) for micro in SIZES)
        rank.profile = ProfileSummary(created_at=1.0, passes=passes)

        def measured(mine: m.RankWork, step: int, *, slope: float = slope, of_sample: int = of_sample) -> dict:
            count = sum(piece.count for piece in mine.ranges)
            seconds = slope * count * chance.uniform(0.9, 1.1)
            peak = (10 + of_sample * mine.micro_batch) * MEGABYTE
            phases = m.Phases(forward=seconds, backward=2 * seconds, sync=chance.uniform(0.01, 0.02), optimizer=0.001)
            return {"phases": phases, "values": memory(peak, peak, CAP)}

        rank.measures = measured


@pytest.mark.parametrize("seed", range(SEEDS))
def test_dialog_and_dry_run_show_what_the_agent_then_does(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(2, 5)
    nodes = tuple(f"n{at}" for at in range(count))
    simulation = Published(nodes, 16 * count, chance)
    calibrated(simulation, chance)
    simulation.begin().until_step(chance.randint(2, 12))
    if chance.random() < 0.5:
        simulation.command("resize-batch", "n0", micro=chance.randint(1, 8))
        simulation.until_step(simulation.conductor.progress.step + 3)
    simulation.command("pause")
    simulation.run()
    state, before = simulation.seen(), simulation.conductor.durable.settings
    request = m.DryRunRequest(rid="r", verb="rebalance", args={"auto": True})
    said = dry_run(simulation.conductor, request, simulation.now)
    split = sp.foresee(sp.auto(sp.opened(state)), said)
    assert not said.refused
    id = simulation.command("rebalance", **split.args)
    simulation.run()
    assert simulation.ends[id].state == "applied"
    after = simulation.conductor.durable.settings
    assert split.shares == tuple(after.shares.values())
    micros = {one.rank: one.micro for one in said.ranks}
    unchosen = {rank: min(of.micro_batch, after.shares[rank]) for rank, of in before.ranks.items()}
    assert after.micros == unchosen | micros
    assert ("auto" in split.args) == (after.micros != unchosen)
