"""The combinations of a bench, the run of each, and its figures from steps made by hand."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import tomli_w
from tests.protocol.support.run_files import good

from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.bench.bench_rows import BenchRow, bench_config, cells, compared, grid, header, measured_row
from trainctl.tui.bench.bench_runs import whole_steps

GENERATION = m.Generation(1, 1)


def step(number: int, seconds: float) -> m.StepCommitted:
    return m.StepCommitted(
        run="r",
        generation=GENERATION,
        step=number,
        committed_at=float(number),
        loss=1.0,
        weight=1.0,
        samples=8,
        learning_rate=1e-3,
        grad_norm=1.0,
        cursor=number,
        global_batch=8,
        plan_version=1,
        step_seconds=seconds,
        tokens=4000,
        tokens_total=4000.0 * number,
    )


def part(number: int, **values: float) -> m.RankStep:
    peaks = {"memory_peak_bytes": 1e9 * number, "memory_cap_bytes": 8e9}
    return m.RankStep(
        run="r",
        generation=GENERATION,
        step=number,
        rank=0,
        node="a",
        tokens=4000.0,
        samples=8,
        micro_batch=2,
        replays=int(values.pop("replays", 0)),
        step_seconds=1.0,
        values={**peaks, **values},
        phases=m.Phases(),
    )


def test_each_combination_is_there_once_the_last_value_changing_fastest() -> None:
    assert grid([]) == [{}]
    found = grid(["model.dtype=float32,bfloat16", "batch.micro=1, 2"])
    assert [[*one.values()] for one in found] == [
        ["float32", "1"],
        ["float32", "2"],
        ["bfloat16", "1"],
        ["bfloat16", "2"],
    ]
    for words in (["batch.micro"], ["batch.micro=1,,2"], ["a.b=1", "a.b=2"], ["a.b=" + ",".join(map(str, range(65)))]):
        with pytest.raises(InvalidInputError, match="--over"):
            grid(words)


def test_a_bench_trains_and_does_nothing_else() -> None:
    config = run_file.parse(
        good()
        | {
            "checkpoint": {"every_steps": 5},
            "evaluate": {"every_steps": 5},
            "nodes": {"a": {"share": 1}, "b": {}},
        }
    )
    found = bench_config(config, "a", 30)
    assert (found.run.steps, [*found.nodes], found.nodes["a"].share) == (30, ["a"], None)
    assert (found.checkpoint.every_steps, found.checkpoint.at_end, found.evaluate.every_steps) == (0, False, 0)
    assert found.policy.micro_batch.mode == "off"
    assert found.batch == config.batch and found.model == config.model


def test_compared_settings_win_over_the_node_s_own_ones() -> None:
    own = {"micro": 2, "compile": "default", "gradient_checkpointing": "all", "micro_tokens": 64, "data_path": "/own"}
    config = run_file.parse(good() | {"nodes": {"a": own, "b": {"micro": 1}}})
    table = bench_config(config, "a", 30, ["batch.micro", "batch.micro_tokens", "model.compile", "data.path"]).nodes[
        "a"
    ]
    assert (table.micro, table.micro_tokens, table.compile, table.data_path) == (None, None, None, None)
    assert table.gradient_checkpointing == "all"
    assert bench_config(config, "a", 30, ["nodes.b.micro"]).nodes["a"].micro == 2
    assert bench_config(config, "a", 30, ["batch.micro", "nodes.a.micro"]).nodes["a"].micro == 2


def test_token_caches_are_where_the_node_keeps_them() -> None:
    config = run_file.parse(good() | {"nodes": {"a": {"cache_path": "/fast"}, "b": {}}})
    paths = [bench_config(config, node, 30, (), "/state/data").nodes[node].cache_path for node in ("a", "b")]
    assert paths == ["/fast", "/state/data"]


def test_samples_are_counted_once_and_steps_for_each_setting(tmp_path: Path) -> None:
    raw = good()
    raw["run"] = {key: value for key, value in raw["run"].items() if key != "steps"} | {"epochs": 2}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(raw))
    counted = list[Mapping[str, str]]()

    def count(_file: Path, _config: RunFile, pairs: Mapping[str, str]) -> int:
        counted.append(pairs)
        return 96

    settings = grid(["batch.global=24,48,many", "model.dtype=float32,bfloat16"])
    assert whole_steps(tmp_path / "run.toml", {}, settings, count) == [8, 8, 4, 4, 0, 0]
    assert len(counted) == 1
    settings = grid(["data.sequence_length=16,32"])
    whole_steps(tmp_path / "run.toml", {}, settings, count)
    assert len(counted) == 3


def test_first_steps_and_those_that_compile_do_not_count() -> None:
    steps = [step(number, 9.0 if number < 4 else 0.5) for number in range(1, 11)]
    parts = [part(number, mfu=0.4, **({"compile_seconds": 8.0} if number == 3 else {})) for number in range(1, 11)]
    row = measured_row({"batch.micro": "2"}, steps, parts, (), "cuda:0 NVIDIA H200")
    assert (row.steps, row.tokens_per_second, row.samples_per_second) == (7, 8000.0, 16.0)
    assert (row.peak_bytes, row.utilization) == (1e10, None)
    assert row.mfu == pytest.approx(0.4)
    assert measured_row({}, steps, [part(4, replays=1)], (), None).note == "ran out of memory: passes of 2"
    assert measured_row({}, [], (), (), None).problem


def test_rows_are_compared_with_the_first_that_was_measured() -> None:
    rows = [BenchRow(settings={"a.b": "1"}, problem="no such device")]
    rows += [
        BenchRow(settings={"a.b": name}, tokens_per_second=rate, step_seconds=1 / rate)
        for name, rate in (("2", 2.0), ("3", 5.0))
    ]
    failed, first, other = compared(rows, (0, 3600, 1800), 4.0)
    assert (failed.against_first, first.against_first, other.against_first) == (None, 1.0, 2.5)
    assert (first.seconds_to_end, first.cost) == (1800.0, 2.0)
    assert (other.steps_of_run, other.seconds_to_end) == (1800, 360.0)
    assert len(cells(failed, "EUR")) == len(header(rows, "samples"))
    assert cells(failed, "EUR")[-1] == "no such device"
    assert compared(rows, (10, 10, 10), None)[1].cost is None
    assert msgspec.to_builtins(other)["settings"] == {"a.b": "3"}
