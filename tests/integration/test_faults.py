"""Processes killed and stopped at every phase of a step: no step is lost, and the run stays on the undisturbed curve.

`make soak` has them on every engine and mix of backends, `make test-all` on gloo with torch. `--schedule-seed` replays
a schedule that failed.
"""

import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from tests.asking import events_of
from tests.cluster.run_files import FOREVER, NODES, on
from tests.cluster.waits import all_steps, wait_for_end
from tests.integration.support.exactness import check_ledger, worst_deviation
from tests.integration.support.fault_table import ALL, MIXES, SEED, TOLERANCE, table, was_lost
from tests.integration.support.faults import PHASES, VICTIMS, Harness, naming, schedule
from tests.integration.support.reference import one_rank_curve
from tests.tiers import is_soak, scale

from trainctl.protocol import messages as m

COUNT = scale("faults of each victim")
GROUPS = ALL if is_soak() else [("gloo", "torch")]
KILLS_UNTIL = 24 * COUNT
STOPS_UNTIL = KILLS_UNTIL + 30
pytestmark = pytest.mark.timeout(300 * COUNT)

OWED = {(victim, "SIGKILL"): 25 for victim in VICTIMS} | {(victim, "SIGSTOP"): 5 for victim in VICTIMS}

FaultyRun = Callable[[Callable[[Harness], object]], list[m.Event]]


@pytest.fixture(params=GROUPS, ids="-".join)
def group(request) -> tuple[str, str]:
    """An engine and a mix of backends."""
    return request.param


@pytest.fixture
def seed(group) -> int:
    """So that groups have unlike schedules."""
    return SEED + ALL.index(group)


@pytest.fixture(scope="module")
def curves() -> dict[str, list[m.StepCommitted]]:
    """Of one rank that nothing disturbs, for each mix of backends; as long as the longest run."""
    return {}


@pytest.fixture(scope="module")
def totals() -> Iterator[Counter[tuple[str, str, str]]]:
    """What was done to all groups together; told at the end, and held to what a whole soak owes."""
    counted: Counter[tuple[str, str, str]] = Counter()
    yield counted
    print("\nall groups together", table(counted), sep="\n")
    if is_soak():
        sums: Counter[tuple[str, str]] = Counter()
        for (victim, number, _), count in counted.items():
            sums[victim, number] += count
        assert all(sums[key] >= owed for key, owed in OWED.items()), sums


@pytest.fixture
def faulty_run(cluster, run_config, group, seed, curves, totals) -> FaultyRun:
    """A run over all nodes that a function disturbs through the harness, and that is then stopped. Each of its steps
    is checked; its events come back."""
    engine, mix = group
    size = {"batch__micro": 1, "data__sequence_length": 64} if mix == "torch" else {}

    def make(**tables) -> dict:
        # The same rate for any number of steps, and low: a high one blows up what mere rounding makes of three ranks.
        rate = {"optimizer__schedule": "constant", "optimizer__learning_rate": 5e-4}
        # Training waits for checkpoints, so that faults strike in them too.
        changes = {"checkpoint": {"every_steps": 5, "at_end": False, "background": False}, **rate, **size, **tables}
        return run_config(run__steps=FOREVER, group={"engine": engine, "first_shares": "even"}, **changes)

    def run(disturb: Callable[[Harness], object]) -> list[m.Event]:
        with (
            cluster.client("alpha") as client,
            naming(f"--schedule-seed {SEED}, {engine}, {mix}"),
        ):
            begun = client.send("start-run", {"config": make(nodes=on(*NODES, **MIXES[mix]))})
            assert begun.state == "applied", begun.reason
            harness = Harness(cluster, client, begun.run)
            disturb(harness)
            client.send("stop", {"checkpoint": False})
            view = wait_for_end(client)
            assert view.state == "stopped", view.reason
            disturbed, events = all_steps(client, begun.run), events_of(client, begun.run)
            backend = "mlx" if mix == "mlx" else "torch"
            if len(curves.get(mix, [])) < view.step:
                alone = on("alpha", alpha={"backend": backend, "micro": 6})
                curves[mix] = one_rank_curve(make(nodes=alone), view.step)
            totals.update(harness.done)
            check_ledger(cluster, begun.run, view.step, was_lost=was_lost(events))
            worst = worst_deviation(disturbed, curves[mix][: view.step])
            print(f"{engine}, {mix}, seed {seed}, worst relative deviation {worst:.1e}", table(harness.done), sep="\n")
            assert worst <= TOLERANCE[mix]
        return list(events)

    return run


@pytest.mark.tier("test")
def test_whatever_is_killed_or_stands_still_in_any_phase_costs_no_step_and_bends_no_curve(faulty_run, seed):
    """One of each kind is killed, and one stopped, and at last two of three ranks die at once."""

    def disturb(harness: Harness) -> None:
        harness.carry_out(schedule(seed, COUNT, (3, KILLS_UNTIL), signal.SIGKILL))
        assert len({phase for _, _, phase in harness.done} & {*PHASES}) == min(len(PHASES), len(VICTIMS) * COUNT)
        assert all(sum(n for key, n in harness.done.items() if key[0] == victim) >= COUNT for victim in VICTIMS)
        harness.carry_out(schedule(seed, 1, (KILLS_UNTIL, STOPS_UNTIL), signal.SIGSTOP))
        harness.strike_together(random.Random(seed).sample(NODES, 2))
        harness.settle()

    events = faulty_run(disturb)
    texts = [event.text for event in events]
    assert sum("rejoins: " in text for text in texts) == sum(" is lost: " in text for text in texts) >= COUNT + 4
    assert any(" is lost: silent" in text for text in texts)
    assert any("'s agent is silent: " in text for text in texts)
    # By a sum that is overdue or, if it stood still while the group was being formed, by a join.
    assert any(" left: " in text for text in texts)
