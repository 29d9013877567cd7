"""Fixtures of in-process agents, and of the run files for them and for real ones.

Every session loads this module, so what the fixtures need is imported in them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.cluster.in_process import BlockingAgent, BlockingCluster


@pytest.fixture(scope="session")
def small_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.cluster.run_files import make_small_assets

    return make_small_assets(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def run_config(small_assets: Path) -> Callable[..., dict[str, Any]]:
    """`small_run` of the small assets."""
    from tests.cluster.run_files import small_run

    return partial(small_run, small_assets)


@pytest.fixture
def cluster(tmp_path: Path) -> "Iterator[BlockingCluster]":
    """Three agents in touch with each other."""
    from tests.cluster.in_process import blocking_cluster

    with blocking_cluster(tmp_path) as made:
        yield made


@pytest.fixture
def agent(tmp_path: Path) -> "Iterator[BlockingAgent]":
    """One agent without a cluster."""
    from tests.cluster.in_process import NODE, blocking_cluster

    with blocking_cluster(tmp_path, (NODE,)) as made:
        yield made[NODE]
