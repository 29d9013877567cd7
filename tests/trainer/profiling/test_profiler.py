"""A rank's profile: the steps it has, its file and its outcome, and what makes one impossible."""

import gzip
import hashlib
import itertools
import json
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.trainer.profiling import profiler as profiling
from trainctl.trainer.profiling import trace_process
from trainctl.trainer.profiling.profiler import Profiler
from trainctl.trainer.profiling.recorders import CAPTURE, VARIABLE, MetalRecorder, PhaseRecorder
from trainctl.trainer.step import side_plans

PHASES = {"data", "forward", "backward", "sync", "optimizer"}


class Profiled:
    """A rig whose steps can be profiled, as the runtime does it."""

    def __init__(self, rig, folder):
        self.rig, self.folder, self.said = rig, folder, list[m.ProfileWritten]()
        self.step = 0

        rig.rank.send = lambda message: self.said.append(message) if isinstance(message, m.ProfileWritten) else None
        self.profiler = Profiler(rig.rank, folder)

    def arm(self, steps):
        return self.profiler.arm(self.rig.plan(self.step, 4, kind="profile", profile_steps=steps, work=()))

    def train(self, count):
        found = []
        for _ in range(count):
            self.step += 1
            self.profiler.before("train")
            with self.profiler.step(self.step):
                found.append(self.rig.train(self.step, 4).loss_sum)
            self.profiler.step_ended(self.step)
        return found

    def evaluate(self):
        self.profiler.before("evaluate")
        work = (m.RankWork(0, (m.Range(0, 2),), 2),)
        side_plans.evaluate(self.rig.rank, self.rig.plan(self.step, 2, kind="evaluate", work=work), time.perf_counter())

    def outcome(self):
        until(lambda: self.said, what="the trace")
        return self.said.pop()

    def profile(self):
        """Record steps 3 and 4 of six; gives the losses of all."""
        losses = self.train(1)
        assert self.arm(2) is None
        assert "is in progress" in (self.arm(2) or "")
        return losses + self.train(5)

    def events(self, done):
        """Those of the trace, which has steps 3 and 4 with their phases, and no other step."""
        assert (done.problem, done.first_step, done.last_step) == ("", 3, 4)
        content = (self.folder / done.file).read_bytes()
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (done.digest, done.size_bytes)
        events: list[dict[str, Any]] = json.loads(gzip.decompress(content))["traceEvents"]
        ranges = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        assert PHASES | {"step 3", "step 4"} <= ranges
        assert not {"step 2", "step 5"} & ranges
        assert {phase.name for phase in done.phases} == PHASES
        return events


@pytest.fixture
def profiled(new_rig, tmp_path):
    opened = []

    def make(backend, name="profiles", **changes):
        opened.append(Profiled(new_rig(backend, **changes), tmp_path / name))
        return opened[-1]

    yield make
    for each in opened:
        each.profiler.close()


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_steps_after_one_that_warms_up_are_in_the_trace(profiled, backend):
    plain, at = profiled(backend, "other").train(6), profiled(backend)
    assert at.profile() == plain
    done = at.outcome()
    assert at.events(done)
    assert all(bool(phase.operators) == (backend == "torch") for phase in done.phases if phase.name == "forward")
    assert at.rig.rank.observer.ranges is None
    assert [path.name for path in at.folder.iterdir()] == [done.file], "nothing half-written is left"
    repeated = [at.profiler.state() for _ in range(profiling.REPEATS + 1)]
    assert repeated == [*[done] * profiling.REPEATS, None]


def test_another_profile_can_follow_and_only_the_newest_traces_are_kept(profiled, monkeypatch):
    monkeypatch.setattr(profiling, "TRACES_KEPT", 1)
    at = profiled("mlx")
    files = []
    for _ in range(2):
        until(lambda: at.arm(1) is None, what="the end of the one before")
        at.train(2)
        files.append(at.outcome().file)
    assert files == ["rank-0.steps-2-2.trace.json.gz", "rank-0.steps-4-4.trace.json.gz"]
    assert [path.name for path in at.folder.iterdir()] == files[1:]


GROWING = {"MAX_GROWTH_BYTES": 0, "resident_bytes": itertools.count().__next__}


@pytest.mark.parametrize(
    ("limits", "why"), [({"MAX_SECONDS": 0.0}, "after 0 s"), (GROWING, "when memory has grown by")]
)
def test_a_recording_beyond_a_limit_ends_early_and_says_so(profiled, limits, why, monkeypatch):
    for name, limit in limits.items():
        monkeypatch.setattr(profiling, name, limit)
    at = profiled("mlx")
    assert at.arm(9) is None
    at.train(3)
    done = at.outcome()
    assert (done.first_step, done.last_step) == (2, 2)
    assert f"1 of 9 steps: recording ends {why}" in done.lacks


def test_an_evaluation_ends_the_recording_and_is_not_in_the_trace(profiled):
    at = profiled("torch")
    assert at.arm(3) is None
    at.evaluate()  # before the step that warms up it disturbs nothing
    at.train(2)
    at.evaluate()
    at.train(2)
    done = at.outcome()
    assert (done.problem, done.first_step, done.last_step) == ("", 2, 2)
    assert done.lacks == "1 of 3 steps: recording ended before a plan to evaluate"
    trace = json.loads(gzip.decompress((at.folder / done.file).read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "forward" in names
    assert "evaluate" not in names
    assert at.arm(3) is None
    at.train(1)
    at.evaluate()
    assert at.outcome().problem == "a plan to evaluate came before the first recorded step; send the command again"
    assert not [path for path in at.folder.iterdir() if path.name != done.file]


@pytest.mark.parametrize("method", ["start", "step_ended", "stop", "write"])
def test_an_error_of_the_recorder_costs_the_profile_and_not_the_step(profiled, method, monkeypatch):
    def fail(*_):
        raise RuntimeError("the library has a bug\nand a long text")

    recorder = PhaseRecorder()
    setattr(recorder, method, fail)
    monkeypatch.setattr(profiling, "make_recorder", lambda *_: recorder)
    at = profiled("mlx")
    problem = at.arm(1)
    assert len(at.train(3)) == 3
    assert (problem or at.outcome().problem) == "the library has a bug"
    at.profiler.close()
    assert not [*at.folder.iterdir()]
    assert at.rig.rank.observer.ranges is None


def test_a_nearly_full_disk_or_a_folder_that_takes_no_file_cost_the_profile_and_leave_nothing(profiled, monkeypatch):
    at = profiled("mlx")
    assert at.arm(1) is None
    monkeypatch.setattr(profiling, "MIN_FREE_BYTES", 2**70)
    at.train(2)
    assert "free some" in at.outcome().problem
    until(lambda: "free some" in (at.arm(1) or ""), what="the end of the one before")
    assert not [*at.folder.iterdir()]
    at.folder.rmdir()
    at.folder.write_text("in the way")
    assert at.arm(1)
    assert at.train(1)


def test_a_rank_that_leaves_starts_no_process_for_its_trace(profiled, monkeypatch):
    monkeypatch.setattr(profiling, "LAST_SECONDS", profiling.KILL_SECONDS)
    left, recorder = threading.Event(), PhaseRecorder()
    monkeypatch.setattr(recorder, "write", lambda path: left.wait())
    monkeypatch.setattr(profiling, "make_recorder", lambda *_: recorder)
    at = profiled("mlx")
    assert at.arm(1) is None
    at.train(2)
    at.profiler.close()
    left.set()
    assert at.outcome().problem == "the rank left before its trace was written"
    assert at.profiler._process is None


def test_a_rank_that_leaves_before_the_end_says_so_and_leaves_nothing(profiled):
    at = profiled("torch")
    assert at.arm(3) is None
    at.train(2)
    at.profiler.close()
    assert at.outcome().problem == "the rank left before all steps were recorded"
    assert not [*at.folder.iterdir()]
    assert at.rig.rank.observer.ranges is None


def test_a_trace_that_cannot_be_read_is_kept_without_a_table_and_one_that_no_viewer_opens_is_not(tmp_path, monkeypatch):
    trace, made = tmp_path / trace_process.TRACE, tmp_path / "a.trace.json.gz"
    trace.write_text('{"traceEvents": [{"ph": "X", "ts": "soon"}]}')
    kept = trace_process.make(tmp_path, made.name)
    assert (kept.phases, kept.problem) == ((), "")
    assert kept.lacks.startswith("no table of operators")
    assert gzip.decompress(made.read_bytes()).startswith(b'{"traceEvents"')
    made.unlink()
    trace.write_text('{"traceEvents": []}')
    monkeypatch.setattr(trace_process, "MAX_TRACE_BYTES", 10)
    assert "profile fewer steps" in trace_process.make(tmp_path, made.name).problem
    assert not made.exists()


@pytest.mark.needs("cuda")
@pytest.mark.usefixtures("gpu_as_found")
def test_on_cuda_the_trace_has_kernels_and_the_phases_the_time_of_those_that_they_launched(profiled, monkeypatch):
    nvtx = NvtxRanges(monkeypatch)
    at = profiled("torch", node={"device": "cuda"})
    at.profile()
    done = at.outcome()
    assert done.lacks == ""
    assert [event for event in at.events(done) if event.get("cat") == "kernel"]
    by_phase = {phase.name: phase for phase in done.phases}
    for name in ("forward", "backward", "optimizer"):
        phase = by_phase[name]
        assert phase.device_seconds > 0, name
        assert any(one.device_seconds > 0 and one.name.startswith("aten::") for one in phase.operators), phase
    assert_nested(nvtx, (2, 3, 4))


class NvtxRanges:
    """Notes the ranges that torch pushes and pops, as paths of those that are open. Without CUDA, it stands for the
    library, which is no part of torch there."""

    def __init__(self, monkeypatch):
        self.open, self.all = list[str](), list[str]()
        import torch

        nvtx = torch.cuda.nvtx
        has_library = torch.cuda.is_available()
        self._library = (nvtx.range_push, nvtx.range_pop) if has_library else (lambda _: 0, lambda: 0)
        monkeypatch.setattr(nvtx, "range_push", self.push)
        monkeypatch.setattr(nvtx, "range_pop", self.pop)

    def push(self, name):
        self.open.append(name)
        self.all.append("/".join(self.open))
        return int(self._library[0](name))

    def pop(self):
        self.open.pop()
        return int(self._library[1]())


def assert_nested(nvtx, steps):
    """Each of these steps, of three micro-batches, has a range with those of its phases in it, and none is left
    open."""
    assert nvtx.open == []
    phases = [*3 * ["/data", "/forward", "/backward"], "/sync", "/optimizer"]
    assert nvtx.all == [f"step {step}{phase}" for step in steps for phase in ("", *phases)]


@pytest.fixture
def nvtx(monkeypatch):
    """Record, as a recorder for CUDA does with the library, on a CPU."""
    from trainctl.trainer.profiling.recorders import TorchRecorder

    monkeypatch.setattr(profiling, "make_recorder", lambda _, steps, folder: TorchRecorder("cuda:0", steps))
    return NvtxRanges(monkeypatch)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_phases_are_ranges_of_nvtx_within_their_step(profiled, nvtx):
    at = profiled("torch")
    at.profile()
    assert at.events(at.outcome())
    assert_nested(nvtx, (2, 3, 4))


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_step_that_raises_leaves_no_range_of_nvtx_open(profiled, nvtx, monkeypatch):
    def fail(*gradients, **how):
        open_ranges.append("/".join(nvtx.open))
        raise RuntimeError("a bug of the library")

    open_ranges: list[str] = []
    at = profiled("torch")
    assert at.arm(2) is None
    at.train(1)
    monkeypatch.setattr("torch.autograd.grad", fail)
    with pytest.raises(RuntimeError, match="a bug of the library"):
        at.train(1)
    assert open_ranges == ["step 2/backward"]
    assert nvtx.open == []


class Metal:
    """Stands for mlx.core.metal."""

    def __init__(self):
        self.path: Path | None = None

    def start_capture(self, path):
        assert self.path is None
        self.path = Path(path)
        self.path.mkdir()

    def stop_capture(self):
        assert self.path is not None
        (self.path / "metadata").write_bytes(b"captured")
        self.path = None


def recorded(folder):
    metal = Metal()
    recorder = MetalRecorder(metal, folder)
    recorder.start()
    for _ in range(3):
        with recorder.range("forward"):
            time.perf_counter()
        recorder.step_ended()
    recorder.stop()
    assert metal.path is None, "the capture has ended"
    return recorder


def test_on_metal_the_first_step_is_captured_and_zipped_with_the_trace(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    recorder = recorded(tmp_path)
    assert "first step only" in recorder.lacks
    recorder.write(tmp_path / trace_process.TRACE)
    made = trace_process.make(tmp_path, "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.read(f"{CAPTURE}/metadata") == b"captured"
        trace = json.loads(archive.read(trace_process.TRACE))
    assert [event["name"] for event in trace["traceEvents"]] == ["forward"] * 2
    assert [phase.name for phase in made.phases] == ["forward"]
    assert made.size_bytes == (tmp_path / "a.zip").stat().st_size
