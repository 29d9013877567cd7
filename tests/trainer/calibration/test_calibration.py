"""A calibration of a real model in its own processes: its profile, how it runs out of memory, and what it leaves.

`make test` calibrates smaller models for less time than `make soak`.
"""

import re
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import tomli_w
from tests.tiers import is_soak
from tests.waiting import HANG_SECONDS

from trainctl.protocol.calibration.profile import (
    CalibrationLine,
    CalibrationPoint,
    CalibrationProgress,
    CalibrationTrying,
    CalibrationWaits,
    key_of,
)
from trainctl.protocol.config import run_file
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.trainer import demo_assets
from trainctl.trainer.backends.load import load
from trainctl.trainer.calibration.sweep import StepRunner, Sweep
from trainctl.trainer.data.dataset import open_dataset

TEXT = Path(__file__).resolve().parents[3] / "examples" / "speeches.txt"
SOAK = is_soak()
BAR_SECONDS = 60.0
"""For the demo's model, as in `make soak`. The processors' time counts, so that other work on the machine doesn't."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("calibration")
    demo_assets.make_model(made / "model")
    shape = {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 64}
    demo_assets.make_model(made / "small", demo_assets.llama_config(**shape))
    demo_assets.make_model(made / "wide", demo_assets.llama_config(**shape, vocabulary=8192))  # 4 MB of logits a sample
    return made


def write(folder, name="run.toml", backend="torch", model="model", seconds=60, **changes):
    raw = {
        "run": {"name": "demo", "steps": 10},
        "model": {"path": str(folder / model), "chunked_loss": "off"},
        "data": {"path": str(TEXT), "tokenizer": "bytes", "sequence_length": 128, "held_out": 0.01},
        "batch": {"global": 24, "micro": 8},
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1},
        "calibration": {"seconds": seconds},
        "nodes": {"a": {"backend": backend, "device": "cpu", "threads": 1, **changes}},
    }
    (folder / name).write_bytes(tomli_w.dumps(raw).encode())
    return folder / name


def start(file, *more):
    arguments = [str(file), "--node", "a", "--caches", str(file.parent / "caches"), *more]
    return subprocess.Popen(
        [sys.executable, "-m", "trainctl.trainer.calibration", *arguments], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def children_seconds():
    """Time that processors have worked for ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def calibrated(file, *more, heard=lambda process, line: None):
    """The profile, and the progress; what the process waits for may begin at once."""
    lines = []
    with start(file, *more) as process:
        for text in process.stdout:
            lines.append(msgspec.json.decode(text, type=CalibrationLine))
            heard(process, lines[-1])
            if isinstance(lines[-1], CalibrationWaits):
                process.stdin.write(f"{lines[-1].stage}\n")
                process.stdin.flush()
        errors = process.stderr.read()
    assert process.returncode == 0, errors
    points = [line.profile for line in lines if isinstance(line, CalibrationPoint)]
    assert len(points) >= len(points[-1].passes), "each is printed as soon as it is measured"
    waited = {line.stage for line in lines if isinstance(line, CalibrationWaits)}
    assert waited == ({1, 2, 3} if "--together" in more else set())
    return points[-1], [line.text for line in lines if isinstance(line, CalibrationProgress)]


@pytest.mark.parametrize("backend", ["mlx", pytest.param("torch", marks=pytest.mark.tier("all"))])
def test_a_calibration_measures_everything_and_leaves_the_model(folder, backend):
    model, seconds = ("model", 60) if SOAK else ("small", 120)  # small is done sooner, but on a busy machine
    file = write(folder, f"{backend}.toml", backend, model, seconds)
    before, begun = model_digests(folder / model).whole, children_seconds()
    profile, progress = calibrated(file, *(["--together"] if backend == "torch" else []))
    assert not SOAK or children_seconds() - begun < BAR_SECONDS
    print(f"{backend}: {profile.duration_seconds:.1f} s, of the processors {children_seconds() - begun:.1f} s")
    assert model_digests(folder / model).whole == before
    config = run_file.read(file)
    assert profile.key == key_of(config, "a", backend=backend, device="cpu", model_digest=before)
    sizes = [one.micro for one in profile.passes]
    assert sizes == sorted(sizes)
    assert {1, 2}.issubset(sizes)
    assert all(one.peak_bytes for one in profile.passes)
    assert profile.out_of_memory_micro is None
    assert all(
        point.micro * point.accumulation >= 24 > point.micro * (point.accumulation - 1) for point in profile.grid
    )
    scored = [one.micro for one in profile.forward]  # as many as fit into the time for them
    assert scored and scored == sizes[: len(scored)]
    assert min(one.seconds for one in profile.forward) < max(one.seconds for one in profile.passes)
    assert profile.beside == ()
    assert {rate.dtype for rate in profile.matmul} == {"float32", "bfloat16", "float16"}
    assert None not in (profile.disk, profile.optimizer_seconds)
    assert any("micro-batch 2" in line for line in progress)


@pytest.mark.tier("all")
@pytest.mark.needs("linux")
def test_what_runs_out_of_memory_is_left_out_and_the_rest_is_measured(folder):
    """In the third micro-batch, the process can have 40 MB more: a sample takes 12, four of them don't fit."""

    def limit_memory(process, line):
        if "out of memory" in str(line):
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        elif line == CalibrationTrying(4):
            held = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text("ascii"))
            hard = resource.prlimit(process.pid, resource.RLIMIT_DATA)[1]
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (int(held[1]) * 1024 + (40 << 20), hard))

    for _ in range(3):  # on a busy machine, a large pass may hold its memory already when the limit is set
        profile, progress = calibrated(write(folder, model="wide", seconds=40), heard=limit_memory)
        if profile.out_of_memory_micro is not None:
            break
    assert f"micro-batch {profile.out_of_memory_micro}: out of memory" in progress
    assert max(known.micro for known in profile.passes) < profile.out_of_memory_micro
    assert profile.matmul and profile.grid, progress


def test_it_ends_with_its_parent(folder):
    process = start(write(folder, backend="mlx", model="small"))
    assert process.stdout.readline()
    process.stdin.close()
    process.wait(timeout=HANG_SECONDS)
    process.stdout.close()
    process.stderr.close()


def test_a_wrong_run_file_is_one_line(folder):
    file = write(folder, "wrong.toml", model_path="/no/such/model")
    with start(file) as process:
        process.wait(timeout=HANG_SECONDS)
        told = process.stderr.read()
    assert process.returncode == 2
    assert told.count("\n") == 1
    assert "model_path" in told


def test_a_sweep_leaves_the_weights(folder, tmp_path):
    config = run_file.read(write(folder, model="small"))
    data, backend = open_dataset(config, folder / "caches", "run.toml"), load(config, config.nodes["a"], "run.toml")
    runner = StepRunner(config, "a", backend, data, tmp_path)
    try:
        runner.step(1, 2)
        weights = backend.copy_out("weights")
        sweep = Sweep(runner, lambda _: None)
        sweep.measure_passes(2)
        assert {known.micro for known in sweep.passes} == {1, 2}
        after = backend.copy_out("weights")
        assert all((after[name] == array).all() for name, array in weights.items())
    finally:
        runner.close()
        data.close()
