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


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a run that has everything."""
    directory = reported_runs.make(tmp_path_factory.mktemp("reported"))
    return html_page.page_html(sections.page(read_facts(RunPaths(directory))))


@pytest.mark.parametrize(("scheme", "colors"), [("light", html_page.LIGHT), ("dark", html_page.DARK)])
def test_a_report_fits_both_widths(page: str, scheme: str, colors: Any, tmp_path: Path) -> None:
    frames = [(page, width) for width in WIDTHS]
    for (_, width), found in zip(frames, browser.lay_out(frames, scheme, tmp_path), strict=True):
        assert found["wrong"] == [], width
        assert (found["width"], found["page"]) == (width, rgb(colors["page"]))
        assert found["drawings"] == found["figures"] >= 5 and found["text"] > 5_000
        assert width == PHONE or found["scrolled"] == 0, "a desktop screen shows whole tables"


def rgb(color: str) -> str:
    """As a browser gives the colour #rrggbb."""
    return f"rgb({', '.join(str(int(color[at : at + 2], 16)) for at in (1, 3, 5))})"
