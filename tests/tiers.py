"""The tiers of the suite, how often things are tried in each, and which tests a tier holds.

`pytest --tier TIER` runs what begins at that tier or before it. A test begins at the tier of its mark
(`@pytest.mark.tier("soak")`), else at that of its module, else at that of its folder.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent
TIERS = ("test", "all", "soak")
FOLDERS = {"hardware": "all", "integration": "all"}
"""Folders of tests/ that begin later than the first tier."""


class Scale(NamedTuple):
    """The number of times that something is tried in each tier."""

    test: int
    all: int
    soak: int


SCALES = {
    "agent kills": Scale(3, 3, 200),
    "bytes of a large cache": Scale(10**9, 10**9, 3 * 10**9),
    "command kills": Scale(10, 40, 200),
    "connections of a viewer": Scale(60, 200, 200),
    "conductor transitions": Scale(50_000, 200_000, 2_000_000),
    "diagnosed runs": Scale(2, 2, 20),
    "estimated runs": Scale(20, 20, 400),
    "events": Scale(30_000, 30_000, 500_000),
    "examples": Scale(25, 100, 100),
    "faults of each victim": Scale(1, 1, 5),
    "frames": Scale(2500, 2500, 1_000_000),
    "guest orders": Scale(20, 20, 200),
    "guest pause seconds": Scale(6, 6, 60),
    "healthy curves": Scale(1, 1, 200),
    "kills of a guest's agent": Scale(5, 5, 50),
    "lead agent kills": Scale(3, 3, 20),
    "names of each kind": Scale(12, 12, 2000),
    "nodes' splits": Scale(20, 20, 500),
    "policy runs": Scale(2, 2, 500),
    "policy steps": Scale(20, 20, 200),
    "power cuts": Scale(3, 3, 200),
    "preemptions": Scale(1, 1, 30),
    "rebalanced runs": Scale(8, 8, 500),
    "runs with own losses": Scale(10, 10, 500),
    "slow ranks": Scale(8, 8, 500),
    "slowdowns": Scale(8, 8, 500),
    "splits on screen": Scale(4, 4, 500),
    "terminations": Scale(1, 1, 30),
}
_options: dict[str, str] = {"tier": TIERS[0], "seed": ""}


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default=TIERS[0], help="the last tier of tests to run (default: test)")
    parser.addoption("--beyond", choices=TIERS[:-1], help="leave out what this tier and those before it hold")
    parser.addoption("--schedule-seed", default="", help="replays a schedule of kills or preemptions that failed")


def configure(config: pytest.Config) -> None:
    """Take the options, before test modules are imported, which read them."""
    _options.update(tier=config.getoption("--tier"), seed=config.getoption("--schedule-seed"))


def scale(name: str) -> int:
    """Return how often something is tried in the tier that runs."""
    return int(getattr(SCALES[name], _options["tier"]))


def is_quick() -> bool:
    return _options["tier"] == TIERS[0]


def is_soak() -> bool:
    return _options["tier"] == TIERS[-1]


def schedule_seed(default: int) -> int:
    return int(_options["seed"] or default)


def tier_of(item: pytest.Item) -> str:
    """Return the tier that a test begins at; of several marks of one test, its own and its parameters', the last."""
    for node in reversed(item.listchain()):
        if own := [mark.args[0] for mark in node.own_markers if mark.name == "tier"]:
            return str(max(own, key=TIERS.index))
    return FOLDERS.get(item.path.relative_to(ROOT).parts[0], TIERS[0])


def chosen(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return those of the tests that begin after `--beyond` and not after `--tier`."""
    beyond = config.getoption("--beyond")
    first = 0 if beyond is None else TIERS.index(beyond) + 1
    wanted = TIERS[first : TIERS.index(config.getoption("--tier")) + 1]
    return [item for item in items if tier_of(item) in wanted]
