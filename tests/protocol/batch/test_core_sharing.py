"""Ranks of one machine divide its cores, whatever their library and agent."""

import pytest
from tests.cluster.run_files import small_run

from trainctl.protocol.batch.core_sharing import Machine, share_cores
from trainctl.protocol.config import run_file

ONE, OTHER, UNKNOWN = Machine("boot-1", 8.0), Machine("boot-2", 4.0), Machine("", 8.0)


@pytest.mark.parametrize(
    ("tables", "machines", "threads"),
    [
        ({"a": {}, "b": {"backend": "mlx"}, "c": {}}, {"a": ONE, "b": ONE, "c": OTHER}, [4, 4, 0]),
        ({"a": {"threads": 5}, "b": {}, "c": {}}, {"a": ONE, "b": ONE, "c": ONE}, [5, 1, 1]),
        ({"a": {"threads": 8}, "b": {}}, {"a": ONE, "b": ONE}, [8, 1]),
        ({"a": {"env": {"OMP_NUM_THREADS": "2"}}, "b": {}}, {"a": ONE, "b": ONE._replace(cores=6.5)}, [0, 6]),
        ({"a": {}, "b": {}}, {"a": UNKNOWN, "b": UNKNOWN}, [0, 0]),
        ({"a": {}, "b": {}}, {"a": ONE}, [0, 0]),
    ],
)  # fmt: skip
def test_what_nodes_do_not_set_is_divided_among_those_of_a_machine(tmp_path, tables, machines, threads):
    shared, lines = share_cores(run_file.parse(small_run(tmp_path, nodes=tables)), machines)
    assert [table.threads for table in shared.nodes.values()] == threads
    assert len(lines) == (1 if len({*machines.values()} & {ONE}) and threads != [0, 0] else 0)
