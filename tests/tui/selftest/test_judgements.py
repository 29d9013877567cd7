"""What checks make of a run and of readings: right ones pass, and each fault is found."""

import math

import msgspec
import pytest

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import CheckpointWritten
from trainctl.tui.selftest.reading_checks import judge_host, judge_nvml, judge_power
from trainctl.tui.selftest.training_checks import (
    AFTER,
    BEFORE,
    FORK,
    JUDGED,
    STEPS,
    TwoRanks,
    judge_checkpoint,
    judge_command,
    judge_losses,
    worst_difference,
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


@pytest.mark.parametrize(("step", "status"), [(JUDGED, "failed"), (JUDGED + 1, "ok")])
def test_losses_after_those_judged_are_only_reported(step: int, status: str) -> None:
    curve = {number: 5.0 - number / 50 for number in range(1, 101)}
    found = judge_losses(two_ranks()._replace(losses={**curve, step: curve[step] * (1 + 1e-4)}, alone=curve))
    assert found.status == status
    assert found.figures["difference_of_all"] == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("found", "alone", "wanted"),
    [
        ({1: 2.0}, {1: 2.0}, 0.0),
        ({1: 3.0}, {1: 2.0}, 0.5),
        ({1: math.nan}, {1: 2.0}, math.inf),
        ({1: None}, {1: 2.0}, math.inf),
        ({1: 2.0, 2: 2.0}, {1: 2.0}, math.inf),
        ({}, {}, math.inf),
    ],
)
def test_curves_are_compared_relative_to_the_second(
    found: dict[int, float | None], alone: dict[int, float | None], wanted: float
) -> None:
    assert worst_difference(found, alone) == wanted


PROCESSES = (m.ProcessReading(pid=1, role="agent"), m.ProcessReading(pid=2, role="trainer", rank=0))
GPU = m.GpuReading("H", 90.0, 1500.0, 300.0, 60.0, 10, 100, others=(m.GpuProcess(7, "python", "anna", 5),))


def reading(**changes: object) -> m.HostReading:
    right = m.HostReading(
        node="a", read_at=0.0, cpu_percent=50.0, memory_used_bytes=10, memory_total_bytes=100, disk_free_bytes=10,
        disk_total_bytes=100, load_1min=1.0, processes=PROCESSES, values={"swap_in_bytes_per_second": 0.0},
    )  # fmt: skip
    return msgspec.structs.replace(right, **changes)


def test_readings_of_the_machine_must_be_there_and_plausible() -> None:
    right = judge_host([reading()])
    assert right.status == "ok"
    assert right.figures["roles"] == ["agent", "trainer"]
    assert judge_host([]).status == "failed"
    for changes, says in (
        ({"cpu_percent": 101.0}, "cpu_percent is 101, outside 0 to 100"),
        ({"memory_used_bytes": None}, "memory_used_bytes is missing in a reading"),
        ({"disk_free_bytes": 101}, "disk_free_bytes is 101, outside 1 to 100"),
        ({"processes": PROCESSES[:1]}, "the processes of this program are ['agent'], without the agent or the trainer"),
    ):
        assert judge_host([reading(**changes)]).evidence[0] == says


def test_power_and_heat_are_judged_where_they_are_read() -> None:
    assert judge_power([reading()], "Linux", has_macmon=False).status == "not here"
    assert judge_power([reading(temperature_celsius=55.0)], "Linux", has_macmon=False).status == "ok"
    assert judge_power([reading(temperature_celsius=200.0)], "Linux", has_macmon=False).status == "failed"
    mac = reading(values={"thermal_pressure": 0.0})
    without = judge_power([mac], "Darwin", has_macmon=False)
    assert without.status == "ok" and "macmon is not on PATH" in without.evidence[1]
    assert judge_power([mac], "Darwin", has_macmon=True).status == "failed"
    assert judge_power([msgspec.structs.replace(mac, gpus=(GPU,))], "Darwin", has_macmon=True).status == "ok"
    assert judge_power([reading()], "Darwin", has_macmon=False).evidence[0] == "macOS gave no thermal pressure"


def test_an_nvidia_device_must_give_everything() -> None:
    right = judge_nvml([reading(gpus=(GPU,))])
    assert right.status == "ok"
    assert "anna" not in str(right.figures)
    assert right.figures["other_processes"] == 1
    assert judge_nvml([reading()]).status == "failed"
    blind = msgspec.structs.replace(GPU, power_watts=None)
    assert judge_nvml([reading(gpus=(blind,))]).evidence[0] == "power_watts is missing in a reading"
