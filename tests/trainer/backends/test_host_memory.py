"""What a process says that it holds of the machine's memory, and that each step's peak is its own."""

import gc
import os
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from tests.lacking import memory_groups
from tests.waiting import HANG_SECONDS

from trainctl.trainer import demo_assets
from trainctl.trainer.backends import memory as host_memory
from trainctl.trainer.backends.memory import HostMemory

MUCH, BLOCK = 50_000_000, 100_000_000


def use_and_free(meanwhile=lambda: None):
    block = np.ones(BLOCK, np.uint8)
    meanwhile()
    del block


def read_again(memory):
    """A reading of now, and not that of a moment ago."""
    first = memory.read()
    while (found := memory.read()) is first:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_on_a_cpu_either_backend_tells_what_the_process_holds(new_rig, backend):
    memory = new_rig(backend).backend.device.memory.read()
    assert memory.used_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.3)
    assert memory.peak_bytes >= memory.used_bytes


@pytest.mark.tier("all")
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_peak_of_a_step_falls_with_its_micro_batch_and_holds_what_the_update_has_freed(new_rig, tmp_path, backend):
    # A wide vocabulary: each array of logits is so large that the allocator gives it back to the system when freed.
    config = demo_assets.llama_config(hidden=16, layers=1, heads=2, intermediate=32, vocabulary=16_000)
    demo_assets.make_model(tmp_path / "wide", config, seed=7)
    rig = new_rig(backend, model__path=str(tmp_path / "wide"), data__sequence_length=128)
    large = rig.train(1, 12)
    assert large.values["memory_peak_bytes"] > large.values["memory_bytes"] + MUCH
    small = rig.train(2, 2)
    assert small.values["memory_bytes"] <= small.values["memory_peak_bytes"] < large.values["memory_peak_bytes"] - MUCH


def test_the_allocator_of_mlx_which_a_gpu_is_asked_for_gives_each_step_s_own_peak(new_rig):
    from trainctl.trainer.backends.mlx_backend import MlxMemory

    gc.collect()  # other tests' models are in the same process
    rig = new_rig("mlx")
    rig.backend.device.memory = MlxMemory(None)  # a CPU's allocator counts as well
    first, large, small = rig.train(1, 2), rig.train(2, 12), rig.train(3, 2)
    assert large.values["memory_peak_bytes"] > large.values["memory_bytes"] > 0
    assert small.values["memory_peak_bytes"] == pytest.approx(first.values["memory_peak_bytes"], rel=0.2)
    held = small.values["memory_bytes"]
    assert small.values["memory_peak_bytes"] - held < (large.values["memory_peak_bytes"] - held) / 2


@pytest.mark.parametrize("kernel", [True, False], ids=["kept by the kernel", "sampled"])
def test_a_peak_is_kept_until_it_was_read_and_is_then_begun_again(kernel, tmp_path, monkeypatch):
    if not kernel:
        monkeypatch.setattr(host_memory, "_CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    memory = HostMemory(None)
    memory.read()
    memory.reset()
    use_and_free(memory.sample)
    memory.reset()  # the next step's: nothing has been read since
    found = read_again(memory)
    assert found.used_bytes is not None and found.peak_bytes is not None
    assert found.peak_bytes > found.used_bytes + MUCH
    memory.reset()
    later = read_again(memory)
    assert later.peak_bytes is not None
    assert later.peak_bytes < found.peak_bytes - MUCH


CAP = """
import sys
from pathlib import Path
from trainctl.trainer.backends.memory import HostMemory
group = Path(sys.argv[1])
(group / "cgroup.procs").write_text("0")
memory = HostMemory(int(sys.argv[2]) or None)
print(memory.read().cap_bytes)
"""


@pytest.mark.needs("cgroups")
@pytest.mark.parametrize(("limit", "cap"), [(0, 2**29), (2**28, 2**28), (2**30, 2**29)])
def test_the_cap_is_that_of_the_control_group_unless_the_node_s_limit_is_lower(limit, cap):
    group = memory_groups() / f"tc{os.getpid()}-cap"
    group.mkdir()
    try:
        version_1, version_2 = group / "memory.limit_in_bytes", group / "memory.max"
        (version_1 if version_1.exists() else version_2).write_text(str(2**29))
        command = [sys.executable, "-c", CAP, str(group), str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    finally:
        group.rmdir()
    assert int(done.stdout) == cap
