"""Ranks of one machine divide its cores, whatever their library and agent."""

from dataclasses import replace

import pytest
from tests.cluster.run_files import small_run

from trainctl.protocol.batch.core_sharing import Machine, share_cores
from trainctl.protocol.calibration.profile import settings_digest
from trainctl.protocol.config import run_file

ONE, OTHER, UNKNOWN = Machine("boot-1", 8.0), Machine("boot-2", 4.0), Machine("", 8.0)


@pytest.mark.parametrize(
    ("tables", "machines", "threads"),
    [
        ({"a": {"shared_threads": 7}, "b": {}}, {"a": ONE, "b": OTHER}, [0, 0]),
        ({"a": {}, "b": {}}, {"a": replace(ONE, threads=3), "b": ONE}, [0, 5]),
        ({"a": {}, "b": {}}, {"a": replace(ONE, threads=3), "b": replace(ONE, threads=2)}, [0, 0]),
        ({"a": {}, "b": {}, "old": {}}, {"a": ONE, "b": ONE, "old": Machine("", 0.0)}, [0, 0, 0]),
        ({"a": {}, "b": {"backend": "mlx"}, "c": {}}, {"a": ONE, "b": ONE, "c": OTHER}, [4, 4, 0]),
        ({"a": {"threads": 5}, "b": {}, "c": {}}, {"a": ONE, "b": ONE, "c": ONE}, [0, 1, 1]),
        ({"a": {"threads": 8}, "b": {}}, {"a": ONE, "b": ONE}, [0, 1]),
        ({"a": {"env": {"OMP_NUM_THREADS": "2"}}, "b": {}}, {"a": ONE, "b": replace(ONE, cores=6.5)}, [0, 4]),
        ({"a": {}, "b": {}}, {"a": UNKNOWN, "b": UNKNOWN}, [0, 0]),
        ({"a": {}, "b": {}}, {"a": ONE}, [0, 0]),
    ],
)  # fmt: skip
def test_what_nodes_do_not_set_is_divided_among_those_that_share_cores(tmp_path, tables, machines, threads):
    shared, lines = share_cores(run_file.parse(small_run(tmp_path, nodes=tables)), machines)
    assert [table.shared_threads for table in shared.nodes.values()] == threads
    assert [table.threads for table in shared.nodes.values()] == [table.get("threads", 0) for table in tables.values()]
    assert len(lines) == (1 if any(threads) else 0)


def test_a_profile_fits_with_and_without_a_part_of_shared_cores(tmp_path):
    config = run_file.parse(small_run(tmp_path, nodes={"a": {}, "b": {}}))
    shared, _ = share_cores(config, {"a": ONE, "b": ONE})
    assert shared.nodes["a"].rank_threads == 4
    assert settings_digest(shared, "a") == settings_digest(config, "a")
