"""The CPU quota of a process's control groups, from the files that a kernel shows."""

import pytest
from tests.node_agent.support.groups import V1_MOUNTS, V2_MOUNTS, machine

from trainctl.protocol.machine.cgroups import cpu_quota

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
