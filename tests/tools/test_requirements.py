"""The packages that the projects need, as the image's libraries and `make lowest` are made of it."""

import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tests.conftest import ROOT

from tools import requirements

EXTRAS = ("tui", "nvidia", "parquet", "zstd", "prometheus", "tensorboard", "discovery")


def test_each_dependency_has_a_lowest_version_at_most_the_tested_one() -> None:
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    needs = [Requirement(line) for line in requirements.requirements(ROOT, EXTRAS)]
    assert {"numpy", "pyzmq", "textual", "tomli-w", "zeroconf"} <= {need.name for need in needs}
    for need in needs:
        (floor,) = (bound.version for bound in need.specifier if bound.operator == ">=")
        assert Version(floor) <= Version(tested[canonicalize_name(need.name)]), need.name
