"""The lowest declared versions, as `make lowest` installs them."""

import re

from packaging.version import Version
from tests.conftest import ROOT

from tools import lowest


def test_each_dependency_has_a_lowest_version_at_most_the_tested_one() -> None:
    floors = dict(line.split("==") for line in lowest.constraints())
    assert {"numpy", "pyzmq", "textual", "tomli-w", "zeroconf"} <= set(floors)
    assert not {"torch", "mlx", "transformers"} & set(floors)
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name, floor in floors.items():
        assert Version(floor) <= Version(tested[name.lower()]), name
