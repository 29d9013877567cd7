"""A run directory that an agent was making as it died is removed by the next one, and no other."""

from pathlib import Path

import pytest
from tests.node_agent.support.simulation import config

from trainctl.node_agent.runs import restore, unstarted
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.record.paths import runs_directory

RUN = config(100, 24, nodes={"a": {"backend": "torch"}})


def opened(node_dir: Path) -> Path:
    """The directory of a run that no database knows yet."""
    opening = restore.new_run(RUN, "c", node_dir, "id-1", "anna")
    opening.recorder.close()
    return opening.paths.directory


def test_only_what_was_being_made_goes(tmp_path: Path) -> None:
    runs = runs_directory(tmp_path)
    unstarted.remove_left(runs, lambda _: False)  # a node's first start
    copied, known, _ = (opened(tmp_path) for _ in range(3))
    unstarted.unmark(copied)
    unstarted.mark(runs / "not-made-yet")
    unstarted.remove_left(runs, {known.name}.__contains__)
    assert {*runs.iterdir()} == {copied, known}
    assert (known / "record.db").exists()


def test_a_run_that_can_t_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(restore, "write_file", full)
    with pytest.raises(RefusedError, match=r"cannot make the run directory: .*No space left"):
        opened(tmp_path)
    assert [*runs_directory(tmp_path).iterdir()] == []
