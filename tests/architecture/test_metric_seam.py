"""A metric is added in its table and where it is measured: shown with a patch that adds one, on a copy of the tree."""

from pathlib import Path

import pytest
from tests.architecture.patched_tree import PATCHES, ROOT, patched, product_files, run_in, touched

PATCH, HOST_PATCH = PATCHES / "new_metric.patch", PATCHES / "new_host_metric.patch"
MOST_NAMING = 5
"""Product files that may name one and the same metric."""

pytestmark = [pytest.mark.tier("all"), pytest.mark.needs("git")]  # it applies the patch


def test_a_new_metric_touches_its_table_and_where_it_is_measured() -> None:
    assert [Path(name).name for name in touched(PATCH)] == ["metrics.py", "executor.py"]
    assert sorted(Path(name).name for name in touched(HOST_PATCH)) == ["host.py", "metrics.py"]


def test_one_metric_is_named_in_few_files() -> None:
    naming = [path for path in product_files() if "memory_peak" in path.read_text("utf-8")]
    assert len(naming) <= MOST_NAMING, [str(path.relative_to(ROOT)) for path in naming]


@pytest.mark.parametrize("patch", [PATCH, HOST_PATCH], ids=["rank", "host"])
def test_a_new_metric_shows_wherever_metrics_do(tmp_path: Path, patch: Path) -> None:
    done = run_in(patched(patch, tmp_path), "-m", f"tests.architecture.{patch.stem}_walk")
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["walked"]), done.stdout + done.stderr
