"""What the check of a profile makes of traces: right ones pass, and each lack is found."""

import zipfile
from pathlib import Path

import msgspec
import pytest

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import Profiled
from trainctl.tui.selftest import profile_check
from trainctl.tui.selftest.profile_check import STEPS, judge_profile

OPERATORS = (m.OperatorTime("aten::mm", 4, 0.1, 0.0),)
NAMES = ("data", "forward", "backward", "sync", "optimizer")
PHASES = {name: m.PhaseProfile(name, 0.1, operators=OPERATORS) for name in NAMES}
CAPTURED = ["capture.gputrace/metadata", "trace.json"]


def trace(last: int = 5 + STEPS - 1, lacks: str = "", **changes: m.PhaseProfile | None) -> Profiled:
    phases = tuple(phase for phase in {**PHASES, **changes}.values() if phase is not None)
    return Profiled(
        node="a", rank=0, first_step=5, last_step=last, file="rank-0.zip", size_bytes=1000, digest="0", phases=phases,
        lacks=lacks,
    )  # fmt: skip


def test_traces_have_what_their_device_gives() -> None:
    right = judge_profile(trace(), [], "torch cpu", "Linux")
    assert right.status == "ok", right.evidence
    assert right.figures["phase_seconds"]["forward"] == 0.1
    for changed, device, system, says in (
        (trace(last=6), "torch cpu", "Linux", "2 of 3 steps were recorded"),
        (trace(backward=None, sync=None), "torch cpu", "Linux", "the trace lacks the phases backward, sync"),
        (trace(forward=m.PhaseProfile("forward", 0.1)), "torch cpu", "Linux", "the forward phase has no operators"),
        (trace(), "torch cuda:0", "Linux", "the trace has no kernels of the GPU"),
        (trace(lacks="the capture failed: x"), "mlx gpu", "Darwin", "the trace has no Metal capture"),
    ):
        assert judge_profile(changed, [], device, system).evidence[0] == says
    kernels = msgspec.structs.replace(PHASES["forward"], device_seconds=0.05)
    assert judge_profile(trace(forward=kernels), [], "torch cuda:0", "Linux").status == "ok"
    plain = {name: m.PhaseProfile(name, 0.1) for name in PHASES}
    captured = judge_profile(trace(lacks="the first step only", **plain), CAPTURED, "mlx gpu", "Darwin")
    assert (captured.status, captured.evidence[1]) == ("ok", "the first step only")
    assert judge_profile(trace(**plain), [], "mlx gpu", "Linux").status == "ok", "MLX on CUDA has no Metal"


@pytest.mark.parametrize("names", [["capture.gputrace/metadata"], []])
def test_the_capture_is_looked_for_in_the_copied_file(tmp_path: Path, names: list[str]) -> None:
    file = tmp_path / "trace"
    file.write_bytes(b"\x1f\x8b no zip")
    assert profile_check._members(file) == []
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    assert profile_check._members(file) == names
