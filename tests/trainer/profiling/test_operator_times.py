"""From a trace's events to the longest operators of each phase."""

import msgspec
import pytest

from trainctl.protocol import messages as m
from trainctl.trainer.profiling.trace_process import Trace, phase_profiles, self_times


def events(*rows):
    made = [{"ph": "X", "pid": 1, "tid": 1, **row} for row in rows]
    return msgspec.json.decode(msgspec.json.encode({"traceEvents": made, "other": [1]}), type=Trace).events


def span(cat, name, ts, dur, **more):
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, **more}


FORWARD = span("user_annotation", "forward", 100, 1000)


def test_an_operators_time_is_without_that_of_the_operators_it_called():
    found = events(
        span("cpu_op", "linear", 0, 100), span("cpu_op", "mm", 10, 60), span("cpu_op", "copy", 20, 15),
        span("cpu_op", "add", 70, 20), span("cpu_op", "relu", 100, 5), span("cpu_op", "elsewhere", 10, 60, tid=2),
    )  # fmt: skip
    own = {event.name: seconds for event, seconds in self_times(found)}
    assert own == {"linear": 20, "mm": 45, "copy": 15, "add": 20, "relu": 5, "elsewhere": 60}


def test_operators_belong_to_the_phase_in_which_they_began_on_any_thread():
    found = events(
        FORWARD, span("user_annotation", "backward", 1200, 500), span("user_annotation", "step 7", 0, 2000),
        span("user_annotation", "backward", 2200, 500),
        span("cpu_op", "mm", 150, 400), span("cpu_op", "mm", 600, 200), span("cpu_op", "mm_backward", 1250, 300, tid=9),
        span("cpu_op", "mm_backward", 2250, 100, tid=9), span("cpu_op", "between", 1150, 10),
    )  # fmt: skip
    forward, backward = phase_profiles(found)
    assert (forward.name, forward.seconds) == ("forward", pytest.approx(1e-3))
    assert (backward.name, backward.seconds) == ("backward", pytest.approx(1e-3))
    (mm,) = forward.operators
    assert (mm.name, mm.calls, mm.seconds, mm.device_seconds) == ("mm", 2, pytest.approx(6e-4), 0.0)
    assert forward.share(mm) == pytest.approx(0.6)
    assert [(one.name, one.calls) for one in backward.operators] == [("mm_backward", 2)]


def test_a_kernel_counts_for_the_operator_and_the_phase_that_launched_it_however_late_it_runs():
    launched = {"correlation": 7, "External id": 3}
    found = events(
        FORWARD, span("user_annotation", "backward", 1200, 500),
        span("cpu_op", "mm", 150, 400, args={"External id": 3}),
        span("cpu_op", "add", 600, 450, args={"External id": 4}),
        span("cuda_runtime", "cudaLaunchKernel", 200, 5, args=launched),
        span("kernel", "sgemm_128", 1300, 250, tid=7, args=launched),
        span("cuda_runtime", "cudaMemcpyAsync", 700, 5, args={"correlation": 8}),
        span("gpu_memcpy", "Memcpy HtoD", 1600, 50, tid=7, args={"correlation": 8}),
    )  # fmt: skip
    forward, backward = phase_profiles(found)
    assert backward.device_seconds == 0.0
    assert forward.device_seconds == pytest.approx(3e-4)
    assert [(one.name, round(forward.share(one), 3)) for one in forward.operators] == [
        ("mm", 0.833), ("Memcpy HtoD", 0.167), ("add", 0.0)
    ]  # fmt: skip


def test_ten_operators_of_each_phase_are_kept_the_longest_first():
    rows = [span("cpu_op", f"op{number:02}" + "x" * 100, 100 + 50 * number, number + 1) for number in range(15)]
    (forward,) = phase_profiles(events(FORWARD, *rows))
    assert len(forward.operators) == m.OPERATORS_KEPT
    assert [one.name[:4] for one in forward.operators] == [f"op{number:02}" for number in range(14, 4, -1)]
    assert {len(one.name) for one in forward.operators} == {80}
