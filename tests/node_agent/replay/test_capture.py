"""A recording made of a run's directory, which may be a copy from another machine."""

from pathlib import Path

import msgspec
import pytest
from tests.tui.support import run_directory

from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.replay import capture
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.paths import RunPaths

SECRET = "what no recording may have"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "state" / "studio" / "runs" / "demo-1")
    run_directory.make(paths.directory)
    return paths


def name_nodes(paths: RunPaths, node: str) -> None:
    with RunDb(paths, resumable=False) as recorder:
        view = msgspec.json.decode(recorder.meta("view") or "", type=m.RunView)
        ranks = tuple(msgspec.structs.replace(rank, node=node) for rank in view.ranks)
        changed = msgspec.structs.replace(view, ranks=ranks)
        recorder.set_meta("view", msgspec.json.encode(changed).decode(), own=True)


def test_a_records_names_and_links_lead_to_no_other_file(paths: RunPaths, tmp_path: Path) -> None:
    outside = RunPaths(tmp_path / "outside" / "runs" / "demo-1")
    outside.logs.mkdir(parents=True)
    for rank in range(run_directory.NODES):
        outside.log(rank).write_text(SECRET)
        paths.log(rank).unlink()
        paths.log(rank).symlink_to(outside.log(rank))
    assert {rank.log for rank in capture.of_run(paths.directory).ranks} == {""}
    name_nodes(paths, "../outside")
    with pytest.raises(InvalidInputError, match="is not a name"):
        capture.of_run(paths.directory)
