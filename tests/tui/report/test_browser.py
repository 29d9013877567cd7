"""Reports in headless Chromium: they fit a telephone and a desktop screen, in the light and in the dark scheme."""

from pathlib import Path
from typing import Any

import pytest
from tests.tui.support import browser, reported_runs

from trainctl.protocol.record.paths import RunPaths
from trainctl.tui.report import html_page, sections
from trainctl.tui.report.read_facts import read_facts

pytestmark = pytest.mark.needs("chromium")
WIDTHS = (PHONE, DESKTOP) = (400, 1280)
PLANTED = {
    "the page is": ("</body>", '<p style="width:392px">x</p></body>'),
    "measures": ("svg{width:100%", "svg{width:10%"),
    "is cut off": ("svg text{fill", "svg text{transform:translateX(-60px);fill"),
    "overlaps": ("11px system-ui", "44px system-ui"),
    "cut off: ": ("overflow-wrap:break-word", "white-space:nowrap"),
}
"""What is found on a telephone, and how it is planted in a page."""


@pytest.fixture(scope="module")
def pages(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a run that has everything, and of a real one with many marks and faults."""
    simulated = reported_runs.make(tmp_path_factory.mktemp("reported"))
    return {"simulated": page_of(simulated), "real": page_of(runs["alpha mixed"])}


def page_of(directory: Path) -> str:
    return html_page.page_html(sections.page(read_facts(RunPaths(directory))))


@pytest.mark.parametrize(("scheme", "colors"), [("light", html_page.LIGHT), ("dark", html_page.DARK)])
def test_a_report_fits_both_widths(pages: dict[str, str], scheme: str, colors: Any, tmp_path: Path) -> None:
    frames = [(page, width) for page in pages.values() for width in WIDTHS]
    for (_, width), found in zip(frames, browser.lay_out(frames, scheme, tmp_path), strict=True):
        assert found["wrong"] == [], width
        assert (found["width"], found["page"]) == (width, rgb(colors["page"]))
        assert found["drawings"] == found["figures"] >= 5 and found["text"] > 5_000
        assert width == PHONE or found["scrolled"] == 0, "a desktop screen shows whole tables"


def rgb(color: str) -> str:
    """As a browser gives the colour #rrggbb."""
    return f"rgb({', '.join(str(int(color[at : at + 2], 16)) for at in (1, 3, 5))})"


def test_what_does_not_fit_is_found(pages: dict[str, str], tmp_path: Path) -> None:
    page = pages["simulated"]
    assert all(page.count(old) for old, _ in PLANTED.values())
    frames = [(page.replace(*planted), PHONE) for planted in PLANTED.values()]
    for what, found in zip(PLANTED, browser.lay_out(frames, "light", tmp_path), strict=True):
        assert any(what in wrong for wrong in found["wrong"]), (what, found)
