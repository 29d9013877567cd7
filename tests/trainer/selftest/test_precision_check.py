"""The precision check with the self-test's own model and text, and the comparison of curves.

`make soak` takes both backends, `make test` one.
"""

import math
from pathlib import Path

import pytest
from tests.tiers import is_soak

from trainctl.trainer.selftest.precision_check import check_precision
from trainctl.trainer.selftest.short_training import STEPS, largest_difference
from trainctl.trainer.selftest.small_assets import make_assets
from trainctl.tui.selftest.local_cluster import backend_table, write_tables
from trainctl.tui.selftest.machine_checks import training_tables


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["torch", "mlx"] if is_soak() else ["torch"])
def test_each_data_type_learns_as_float32_does(tmp_path: Path, backend: str) -> None:
    make_assets(tmp_path)
    table = {**backend_table(backend), "device": "cpu"}
    write_tables(tmp_path / "run.toml", training_tables(tmp_path, table))
    outcome = check_precision(tmp_path / "run.toml", "a")
    assert outcome.status == "ok", outcome.evidence
    dtypes = outcome.figures["dtypes"]
    assert set(dtypes) == {"float32", "bfloat16", "bf16-sr", "float16"}
    assert all(len(one["losses"]) == STEPS + 1 for one in dtypes.values())
    assert 5.4 < dtypes["float32"]["losses"][0] < 5.6  # about the logarithm of 264 tokens, on every machine


def test_curves_are_compared_relative_to_the_second() -> None:
    assert largest_difference([2.0, 3.0], [2.0, 2.0]) == 0.5
    assert largest_difference([2.0, math.nan], [2.0, 2.0]) == math.inf
    assert largest_difference([2.0], [2.0, 2.0]) == math.inf


def test_the_assets_are_the_same_bits_everywhere(tmp_path: Path) -> None:
    assert make_assets(tmp_path) == {"parameters": 116_032, "text_bytes": 65_022}
    assert (tmp_path / "data" / "sums.txt").read_text().splitlines()[0] == "838 + 758 = 1596"
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    make_assets(tmp_path / "again")
    assert (tmp_path / "again" / "model" / "model.safetensors").read_bytes() == before
