"""What checks make of a run and of readings: right ones pass, and each fault is found."""

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import CheckpointWritten
from trainctl.tui.selftest.reading_checks import judge_host
from trainctl.tui.selftest.training_checks import (
    AFTER,
    BEFORE,
    FORK,
    STEPS,
    TwoRanks,
    judge_checkpoint,
    judge_command,
    judge_losses,
)

GENERATION = m.Generation(1, 1)
CURVE = {step: 5.0 - step / 10 for step in range(1, STEPS + 1)}
RESUMED = {step: loss for step, loss in CURVE.items() if step > FORK}
WRITTEN = [CheckpointWritten(step=FORK, size_bytes=10), CheckpointWritten(step=STEPS, size_bytes=10)]


def test_a_checkpoint_must_give_the_same_bits() -> None:
    assert judge_checkpoint(CURVE, RESUMED, WRITTEN, "torch cpu").status == "ok"
    changed = {**RESUMED, STEPS: RESUMED[STEPS] * (1 + 1e-15)}
    assert judge_checkpoint(CURVE, changed, WRITTEN, "torch cpu").status == "failed"
    assert judge_checkpoint(CURVE, {}, WRITTEN, "torch cpu").status == "failed"
    unwritten = judge_checkpoint(CURVE, RESUMED, WRITTEN[1:], "torch cpu")
    assert unwritten.evidence[0] == "no event says that the checkpoint of step 4 was written"


def part(step: int, rank: int, samples: int) -> m.RankStep:
    return m.RankStep(
        run="r", generation=GENERATION, step=step, rank=rank, node="ab"[rank], tokens=1.0, samples=samples,
        micro_batch=4, replays=0, step_seconds=0.1, phases=m.Phases(),
    )  # fmt: skip


def two_ranks(change: int = 5, second: int | None = None, state: str = "applied") -> TwoRanks:
    """A run whose ranks changed their shares at `change`, the second one at `second`; the command says step 5."""
    when = (change, change if second is None else second)
    parts = [
        part(step, rank, (BEFORE if step < when[rank] else AFTER)[rank]) for step in range(2, 9) for rank in (0, 1)
    ]
    reply = m.CommandReply(rid="1", id="1", state=state, step=5 if state == "applied" else None, reason="no")
    return TwoRanks(CURVE, CURVE, parts, reply, "gloo", "torch cpu, mlx cpu")


def test_a_command_takes_effect_at_one_step() -> None:
    assert judge_command(two_ranks()).status == "ok"
    assert judge_command(two_ranks(change=6)).evidence[0] == (
        "rank 0 had 8 samples at step 5; the command took effect at step 5"
    )
    assert judge_command(two_ranks(second=6)).evidence[0].startswith("rank 1 had 4 samples at step 5")
    assert judge_command(two_ranks(state="rejected")).evidence == ("the command was rejected: no",)
    assert judge_command(two_ranks()._replace(parts=[])).status == "failed"


def test_two_ranks_must_have_one_ranks_losses() -> None:
    run = two_ranks()
    assert judge_losses(run).status == "ok"
    assert judge_losses(run._replace(losses={**CURVE, 3: CURVE[3] * (1 + 1e-5)})).status == "failed"
    assert judge_losses(run._replace(alone={})).status == "failed"


def test_readings_of_the_machine_must_be_there_and_plausible() -> None:
    processes = (m.ProcessReading(pid=1, role="agent"), m.ProcessReading(pid=2, role="trainer", rank=0))
    right = m.HostReading(
        node="a", read_at=0.0, cpu_percent=50.0, memory_used_bytes=10, memory_total_bytes=100, disk_free_bytes=10,
        disk_total_bytes=100, load_1min=1.0, processes=processes, values={"swap_in_bytes_per_second": 0.0},
    )  # fmt: skip
    assert judge_host([right]).status == "ok"
    for changes in ({"cpu_percent": 101.0}, {"memory_used_bytes": None}, {"processes": processes[:1]}):
        assert judge_host([msgspec.structs.replace(right, **changes)]).status == "failed"
