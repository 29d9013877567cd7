"""The CPU quota of a process's control groups, from the files that a kernel shows."""

import os
import subprocess
import sys

import pytest
from tests.node_agent.support.groups import V1_MOUNTS, V2_MOUNTS, machine

from trainctl.protocol.machine.cgroups import core_pool, cpu_quota

OWN = "fs/cpu/box/cpu.cfs_"
PERIOD = "100000\n"


@pytest.mark.parametrize(
    "mounts, cgroup, files, cores",
    [
        (V2_MOUNTS, "0::/pod/box\n", {"fs/pod/cpu.max": "150000 100000\n", "fs/pod/box/cpu.max": "max 9\n"}, 1.5),
        (V2_MOUNTS, "0::/pod/box\n", {"fs/pod/cpu.max": "max 100000\n", "fs/pod/box/cpu.max": "5000 20000\n"}, 0.25),
        (V2_MOUNTS, "0::/box\n", {}, None),
        (V1_MOUNTS, "4:cpu:/box\n", {f"{OWN}quota_us": "20000\n", f"{OWN}period_us": PERIOD}, 0.2),
        (V1_MOUNTS, "4:cpu:/box\n", {f"{OWN}quota_us": "-1\n", f"{OWN}period_us": PERIOD}, None),
    ],
)  # fmt: skip
def test_the_tightest_quota_counts(tmp_path, mounts, cgroup, files, cores):
    assert cpu_quota("42", machine(tmp_path, mounts, cgroup, files)) == cores


@pytest.mark.needs("linux")
def test_processes_share_cores_if_the_same_group_limits_them(tmp_path):
    """Containers each see their own group as /, with a limit that says the same: its inode differs."""
    pools = []
    for box, quotas in (("a", "50000"), ("b", "50000"), ("c", "max")):
        files = {"fs/pod/cpu.max": "max 100000\n", "fs/pod/box/cpu.max": f"{quotas} 100000\n"}
        proc = machine(tmp_path / box, V2_MOUNTS, "0::/pod/box\n", files, "self")
        pools += [core_pool("self", proc), core_pool("self", proc)]
    assert pools[0] == pools[1] and pools[4] == pools[5] and len({*pools}) == 3


@pytest.mark.needs("linux")
def test_processes_on_other_processors_share_no_cores():
    words = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}]); "
    asked = "from trainctl.protocol.machine.cgroups import core_pool; print(core_pool())"
    found = subprocess.run([sys.executable, "-c", words + asked], capture_output=True, text=True, check=True)
    assert (found.stdout.strip() == core_pool()) == (len(os.sched_getaffinity(0)) == 1)
