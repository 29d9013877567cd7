"""Steps are predicted from passes that were timed between them, in CPU seconds, so that other programs don't count."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.protocol.support.profiles import profile_of

from trainctl.protocol.advice.advice_facts import AdviceFacts, NodeFacts, PlannedRun
from trainctl.protocol.advice.plans import plan_of
from trainctl.protocol.calibration.profile import Pass
from trainctl.protocol.config import run_file
from trainctl.trainer import demo_assets
from trainctl.trainer.backends.load import load
from trainctl.trainer.calibration.step_runner import StepRunner
from trainctl.trainer.data.dataset import open_dataset

ROUNDS = 5
TIMED = (1, 2, 4)
"""Micro-batches whose passes are timed."""
STEPS = ((12, 2), (12, 4), (10, 4))
"""Samples and micro-batch of the steps that are predicted: some are not timed as such."""
NEAR = 0.25
"""Relative error. To leave out a step's last pass, or its curve, is wrong by more."""


@pytest.fixture
def runner(tmp_path: Path) -> Any:
    small = demo_assets.llama_config(hidden=64, layers=2, heads=2, intermediate=160)
    demo_assets.make_model(tmp_path / "model", small)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a text of some length, with words " * 400)
    raw = {
        "run": {"name": "small", "steps": 10}, "model": {"path": "model"},
        "data": {"path": "data", "tokenizer": "bytes", "sequence_length": 128}, "batch": {"global": 12, "micro": 4},
        "optimizer": {"learning_rate": 1e-3}, "nodes": {"a": {"backend": "torch", "device": "cpu", "threads": 1}},
    }  # fmt: skip
    file = tmp_path / "run.toml"
    file.write_bytes(tomli_w.dumps(raw).encode())
    config = run_file.read(file)
    data, backend = open_dataset(config, tmp_path / "caches", "run.toml"), load(config, config.nodes["a"], "run.toml")
    made = StepRunner(config, "a", backend, data, tmp_path)
    try:
        yield made
    finally:
        made.close()
        data.close()


def cpu_seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def predicted(passes: dict[int, float], update: float, samples: int, micro: int) -> float:
    """By the same functions as `trainctl advise`."""
    timed = tuple(Pass(size, seconds) for size, seconds in passes.items())
    node = NodeFacts(name="a", profiles=(profile_of(passes=timed, optimizer_seconds=update),), micro=micro)
    run = PlannedRun(file="run.toml", steps=10, global_batch=samples, tokens_per_sample=128.0)
    seconds = plan_of(AdviceFacts(run=run, nodes=(node,)), ["a"], "alone").step_seconds
    assert seconds is not None
    return seconds


@pytest.mark.tier("soak")
def test_whole_steps_take_what_their_passes_predict(runner: StepRunner) -> None:
    runner.settle()
    for micro in TIMED:
        runner.step(micro, micro)  # the first of a size also allocates
    ratios: dict[tuple[int, int], list[float]] = {step: [] for step in STEPS}
    for _ in range(ROUNDS):
        whole = {micro: cpu_seconds(lambda micro=micro: runner.step(micro, micro)) for micro in TIMED}
        twice = cpu_seconds(lambda: runner.step(TIMED[0], 2 * TIMED[0]))
        update = max(2 * whole[TIMED[0]] - twice, 1e-6)
        passes = {micro: max(seconds - update, 1e-6) for micro, seconds in whole.items()}
        for step in STEPS:
            samples, micro = step
            taken = cpu_seconds(lambda samples=samples, micro=micro: runner.step(micro, samples))
            ratios[step].append(predicted(passes, update, samples, micro) / taken)
    found = {step: statistics.median(values) for step, values in ratios.items()}
    assert all(abs(ratio - 1) <= NEAR for ratio in found.values()), found
