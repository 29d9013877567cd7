"""A bench reads the micro-batches that the run would train on."""

import numpy as np
import pytest

from trainctl.trainer.data.dataset import open_dataset
from trainctl.trainer.step import data_bench
from trainctl.trainer.step.data_bench import MicroBatchReader, bench


def test_an_epoch_is_each_step_s_share_in_micro_batches(run_file, tmp_path):
    here = {"backend": "torch", "device": "cpu", "threads": 1, "share": 8, "micro": 3}
    config = run_file(nodes__here=here, nodes__there={"share": 4})
    dataset = open_dataset(config, tmp_path / "caches", "run.toml")
    pieces = list(MicroBatchReader(config, "here", dataset).pieces())
    steps = dataset.samples // 12
    assert [len(piece) for piece in pieces] == [3, 3, 2] * steps
    whole = np.concatenate(pieces).reshape(steps, 8)
    assert (whole == whole[:, :1] + np.arange(8)).all() and (np.diff(whole[:, 0]) == 12).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_rates_are_those_of_the_data(run_file, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(data_bench, "WARM_SECONDS", 0.01)
    config = run_file(data__workers=workers, data__prefetch=2 * (workers - 1))
    dataset = open_dataset(config, tmp_path / "caches", "run.toml")
    found = bench(config, "here", "run.toml", tmp_path, with_model=workers == 1)
    epoch = dataset.samples // 12 * 12 * 20
    assert found.cold is None or found.cold.tokens == epoch
    assert found.warm.tokens > 0 and found.warm.tokens / found.warm.micro_batches == 4 * 20
    assert dataset.samples * 20 < found.tokens < found.source_bytes + 100
    assert (found.need is not None) == (workers == 1)
    if found.need is not None:
        assert found.need.tokens_per_second > 0 and found.need.detail == "3 micro-batches with torch on cpu"
    assert not list(tmp_path.glob("trainctl-bench-*"))
