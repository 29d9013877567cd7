"""The pictures of docs/operating.md, copied from those that the tests of the screens make and compare.

`python -m tools.pictures [--check]` copies them, or says which are out of date.
"""

import argparse
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "docs" / "pictures"
SNAPSHOTS: Final = ROOT / "tests" / "tui" / "screens" / "__snapshots__"
SOURCES: Final = {
    "group.svg": "test_pictures/test_overview_of_a_mixed_group[120x40].svg",
    "node.svg": "test_pictures/test_node[120x40].svg",
    "calibration.svg": "test_calibration/test_pictures[120x40].svg",
    "charts.svg": "test_chart_pictures/test_charts_with_log_crosshair_smoothing_and_tokens[120x40].svg",
    "events.svg": "test_pictures/test_tables[events-120x40].svg",
    "alert.svg": "test_alerts/test_picture_of_alerts_on_the_overview[why].svg",
    "diagnosis.svg": "test_diagnosis/test_the_screen[several-120x40].svg",
    "policies.svg": "test_policies/test_the_panel_on_a_policy_that_has_acted[120x40].svg",
    "profile.svg": "test_step_profile/test_the_screen[120x40].svg",
    "split.svg": "test_pictures/test_split_dialog[plan].svg",
}
"""Picture of the docs -> picture of the tests."""


def out_of_date() -> list[str]:
    """The pictures of the docs that are missing or differ from the tests' pictures."""
    kept = {name: FOLDER / name for name in SOURCES}
    return [name for name, file in kept.items() if not file.is_file() or file.read_bytes() != made(name)]


def made(name: str) -> bytes:
    """The tests' picture of that name."""
    return (SNAPSHOTS / SOURCES[name]).read_bytes()


def main() -> int:
    """Copy or check them; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures")
    parser.add_argument("--check", action="store_true", help="copy nothing; fail if a picture is out of date")
    old = out_of_date()
    if parser.parse_args().check:
        for name in old:
            print(f"docs/pictures/{name} is out of date: run python -m tools.pictures", file=sys.stderr)
        return 1 if old else 0
    for name in old:
        (FOLDER / name).write_bytes(made(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
