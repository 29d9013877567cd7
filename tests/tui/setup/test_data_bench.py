"""What a person reads of a run's data rates, and the run that says what training takes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from tests.tui.support import run_directory

from trainctl.protocol.batch.data_rates import Assembling, DataRates, StepNeed
from trainctl.protocol.config import run_file
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.setup import recorded_runs
from trainctl.tui.setup.data_bench import conclusion, known_need

RATES = DataRates(
    source_bytes=40_000_000, tokens=10_000_000, tokenizing_seconds=12.5, processes=2, micro_batch=8, prefetch=2,
    workers=1, cold=Assembling(100, 400_000, 1.0), warm=Assembling(600, 1_200_000, 1.0),
    need=StepNeed(12_000.0, "run", "sft-1"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("need", "says"),
    [
        (600_000.0, "data takes 50 % of a step, but 150 % cold: keep the token cache on a faster disk (cache_path)"),
        (2_400_000.0, "data takes 200 % of a step: training waits for it; raise data.workers"),
    ],
)
def test_slow_data_come_with_a_remedy(need: float, says: str) -> None:
    assert says in conclusion(msgspec.structs.replace(RATES, need=StepNeed(need, "given")))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run file; and a run of it that this machine has recorded."""
    raw = {
        "run": {"name": "a", "steps": 9}, "model": {"path": "/model"}, "data": {"path": "/data"},
        "batch": {"global": 24, "micro": 4}, "optimizer": {"learning_rate": 1e-3},
    }  # fmt: skip
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
    (node, *_) = recorded_nodes(tmp_path)
    other = msgspec.structs.replace(config, batch=msgspec.structs.replace(config.batch, micro=2))
    assert recorded_runs.newest_like(other, node) is None
    assert recorded_runs.newest_like(config, "elsewhere") is None
    (tmp_path / "studio" / "runs" / "a-1" / "run.toml").write_text("[run", "utf-8")
    assert recorded_runs.newest_like(config, node) is None


def recorded_nodes(root: Path) -> list[str]:
    with RecordReader(root / "studio" / "runs" / "a-1") as record:
        return [*record.totals().tokens_by_node]
