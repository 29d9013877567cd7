"""What is said of installing is true as long as trainctl is in no package index: from a checkout."""

import re
from pathlib import Path

from trainctl.protocol.errors import installing

ROOT = Path(__file__).parents[3]
TEXTS = [
    ROOT / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *(file for room in ("protocol", "trainer", "node_agent", "tui") for file in (ROOT / room).rglob("*.py")),
]


def test_nothing_tells_to_install_trainctl_from_an_index() -> None:
    assert len(TEXTS) > 300
    told = [
        (file.name, found) for file in TEXTS for found in re.findall(r"pip install[^\n]*trainctl\[", file.read_text())
    ]
    assert not told


def test_extras_are_named_as_a_checkout_takes_them() -> None:
    assert installing("torch", "mlx") == "in a trainctl checkout, run: pip install ./protocol '.[torch]' or '.[mlx]'"
