"""The precision check with the self-test's own model and text."""

import pytest

from trainctl.trainer.selftest.precision_check import check_precision
from trainctl.trainer.selftest.short_training import STEPS
from trainctl.trainer.selftest.small_assets import make_assets
from trainctl.tui.selftest.local_cluster import backend_table, write_tables
from trainctl.tui.selftest.machine_checks import training_tables


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["torch", pytest.param("mlx", marks=pytest.mark.tier("soak"))])
def test_each_data_type_learns_as_float32_does(tmp_path, backend):
    make_assets(tmp_path)
    table = {**backend_table(backend), "device": "cpu"}
    write_tables(tmp_path / "run.toml", training_tables(tmp_path, table))
    outcome = check_precision(tmp_path / "run.toml", "a")
    assert outcome.status == "ok", outcome.evidence
    dtypes = outcome.figures["dtypes"]
    assert set(dtypes) == {"float32", "bfloat16", "bf16-sr", "float16"}
    assert all(len(one["losses"]) == STEPS + 1 for one in dtypes.values())
    assert 5.4 < dtypes["float32"]["losses"][0] < 5.6  # about the logarithm of 264 tokens, on every machine


def test_the_assets_are_the_same_bits_everywhere(tmp_path):
    assert make_assets(tmp_path) == {"parameters": 116_032, "text_bytes": 65_022}
    assert (tmp_path / "data" / "sums.txt").read_text().splitlines()[0] == "838 + 758 = 1596"
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    make_assets(tmp_path / "again")
    assert (tmp_path / "again" / "model" / "model.safetensors").read_bytes() == before
