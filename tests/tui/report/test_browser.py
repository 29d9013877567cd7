"""Reports in headless Chromium: they fit a telephone and a desktop screen, in the light and in the dark scheme."""

from pathlib import Path
from typing import Any

import pytest
from tests.tui.support import browser, reported_runs

from trainctl.protocol.record.paths import RunPaths
from trainctl.tui.report import html_page, sections
from trainctl.tui.report.read_facts import read_facts

WIDTHS = (400, 1280)


@pytest.mark.needs("chromium")
@pytest.mark.parametrize(("scheme", "colors"), [("light", html_page.LIGHT), ("dark", html_page.DARK)])
def test_a_report_of_a_run_that_has_everything_fits_both_widths(scheme: str, colors: Any, tmp_path: Path) -> None:
    page = html_page.page_html(sections.page(read_facts(RunPaths(reported_runs.make(tmp_path)))))
    red, green, blue = (int(colors["page"][at : at + 2], 16) for at in (1, 3, 5))
    for width, found in zip(WIDTHS, browser.lay_out(page, WIDTHS, scheme, tmp_path), strict=True):
        assert (found["wrong"], found["width"], found["page"]) == ([], width, f"rgb({red}, {green}, {blue})")
        assert len(found["drawings"]) >= 5 and min(found["drawings"]) >= 200 and found["text"] > 5_000
