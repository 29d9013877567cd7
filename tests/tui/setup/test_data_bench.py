"""What a person reads of a run's data rates, and the run that says what training takes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from tests.protocol.support.run_files import good, with_value
from tests.tui.support import run_directory

from trainctl.protocol.batch.data_statistics import StepNeed
from trainctl.protocol.config import run_file
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.setup import recorded_runs
from trainctl.tui.setup.data_preview import known_need


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run file; and a run of it that this machine has recorded."""
    raw = with_value(with_value(with_value(good(), "model.path", "/model"), "data.path", "/data"), "batch.micro", 4)
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path))
    directory = run_directory.make(tmp_path / "studio" / "runs" / "a-1")
    (directory / "run.toml").write_text(tomli_w.dumps(raw), "utf-8")
    return run_file.parse(raw)


def test_a_run_with_the_same_settings_says_what_training_takes(config: Any, tmp_path: Path) -> None:
    with RecordReader(tmp_path / "studio" / "runs" / "a-1") as record:
        totals, (first, *_) = record.totals(), record.steps(limit=1)[0]
        part = record.rank_steps(first.step)[0]
    tokens = totals.tokens_by_node[part.node] - part.tokens
    found = known_need(config, part.node, None)
    assert found is not None and (found.source, found.detail) == ("run", "a-1")
    assert found.tokens_per_second == pytest.approx(tokens / (totals.step_seconds - first.step_seconds))
    assert known_need(config, part.node, 7.0) == StepNeed(7.0, "given")


def test_runs_with_other_settings_or_on_other_nodes_say_nothing(config: Any, tmp_path: Path) -> None:
    with RecordReader(tmp_path / "studio" / "runs" / "a-1") as record:
        (node, *_) = record.totals().tokens_by_node
    other = msgspec.structs.replace(config, batch=msgspec.structs.replace(config.batch, micro=2))
    assert recorded_runs.newest_like(other, node) is None
    assert recorded_runs.newest_like(config, "elsewhere") is None
    (tmp_path / "studio" / "runs" / "a-1" / "run.toml").write_text("[run", "utf-8")
    assert recorded_runs.newest_like(config, node) is None
