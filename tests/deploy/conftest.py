"""Fixtures that tests of the deployment share: this checkout's programs, and images that are built once."""

import os
import sys
from collections.abc import Iterator

import pytest
from tests.deploy.support.builds import Builds
from tests.node_agent.support.processes import ENVIRONMENT


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose PATH has this checkout's programs, and their Python, as an image has."""
    folder = tmp_path_factory.mktemp("bin")
    found = {"trainctl": "-m trainctl.tui.cli.main", "trainctl-agent": "-m trainctl.node_agent.cli", "python3": ""}
    for name, module in found.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n', "utf-8")
        (folder / name).chmod(0o755)
    return {**os.environ, **ENVIRONMENT, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builds]:
    """Images by target, each built when a test first asks for it."""
    made = Builds(tmp_path_factory.mktemp("builds"))
    yield made
    made.close()
