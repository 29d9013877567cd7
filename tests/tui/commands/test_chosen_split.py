"""`rebalance auto=true`: dialog and dry run find the same shares and micro-batches as the agent, from its view."""

import random

import msgspec
import pytest
from tests.memory_values import memory
from tests.node_agent.support.simulation import Simulation, config, durable
from tests.tiers import scale
from tests.tui.support.recorded import BOOT, CLOCK, snapshot

from trainctl.node_agent.conductor import views
from trainctl.node_agent.conductor.dry_run import dry_run
from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import Pass, ProfileSummary
from trainctl.tui.commands import share_editor, shares
from trainctl.tui.state import reducer
from trainctl.tui.state.view_state import ViewState

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
    found = shares.fastest(shares.seats_of(state))
    split = share_editor.auto(share_editor.opened(state))
    request = m.DryRunRequest(rid="r", verb="rebalance", args={"auto": True})
    said = dry_run(simulation.conductor, request, simulation.now)
    assert (said.refused == "" and said.ranks) or before.shares == found.shares
    id = simulation.command("rebalance", auto=True)
    simulation.run()
    assert simulation.ends[id].state == "applied"
    after = simulation.conductor.durable.settings
    assert split.shares == found.shares == tuple(after.shares.values())
    in_force = tuple(min(pair) for pair in zip(found.micros, found.shares, strict=True))
    assert in_force == tuple(after.micros.values())
    changed = in_force != tuple(
        min(seat.micro_batch, share) for seat, share in zip(split.seats, found.shares, strict=True)
    )
    assert split.args == ({"auto": True} if changed else {"shares": dict(zip(nodes, found.shares, strict=True))})
    by_lead = {one.rank: (one.share, one.micro) for one in said.ranks}
    for rank, share in enumerate(found.shares):
        assert by_lead.get(rank, (share, after.micros[rank])) == (share, after.micros[rank])
