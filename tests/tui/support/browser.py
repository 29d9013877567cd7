"""Pages as headless Chromium lays them out: what doesn't fit, by width and scheme."""

import contextlib
import html
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.waiting import HANG_SECONDS

SCHEMES = {"dark": 0, "light": 1}
"""Values of Chromium's own setting for what a person prefers."""
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-crash-reporter", "--no-first-run",
    "--window-size=1400,1000",
)  # fmt: skip
_PROBE = """
<script>
function* textRects(root) {
  const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    if (!node.data.trim() || node.parentElement.closest("svg, script, style")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) yield [node, rect];
  }
}
function probe() {
  document.querySelectorAll("details").forEach(one => { one.open = true; });
  const wrong = [], page = document.documentElement;
  if (page.scrollWidth > page.clientWidth) wrong.push(`the page is ${page.scrollWidth} wide`);
  for (const [node, rect] of textRects(document.body)) {
    const cell = node.parentElement.closest("td, th, li, p, blockquote, section, body").getBoundingClientRect();
    const clipped = getComputedStyle(node.parentElement).overflow === "hidden";
    if (clipped || rect.left < cell.left - 1 || rect.right > cell.right + 1) wrong.push(`cut off: ${node.data}`);
  }
  const shown = [...document.querySelectorAll("svg")].map(one => one.getBoundingClientRect().width).filter(Boolean);
  return {
    wrong, width: innerWidth, drawings: shown, text: document.body.innerText.length,
    page: getComputedStyle(document.body).backgroundColor,
  };
}
</script></body>"""
_WRAPPER = """<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><body>%s<script>
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(one => one.contentWindow.probe());
  document.body.textContent = `[[[${JSON.stringify(found)}]]]`;
};
</script></body>"""


def lay_out(page: str, widths: Iterable[int], scheme: str, folder: Path) -> list[dict[str, Any]]:
    """Return what Chromium finds of a page at each width in pixels: `wrong`, what doesn't fit; `drawings`, the widths
    of those that are shown; `text`, how many characters are shown; `page`, its background."""
    probed = html.escape(page.replace("</body>", _PROBE))
    frames = (f'<iframe srcdoc="{probed}" style="border:0;width:{width}px;height:800px"></iframe>' for width in widths)
    file = folder / f"{scheme}.html"
    file.write_text(_WRAPPER % "".join(frames), "utf-8")
    setting = f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
    words = ["chromium", *FLAGS, f"--user-data-dir={folder / 'profile'}", setting, "--dump-dom", file.as_uri()]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            shown, said = process.communicate(timeout=HANG_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its renderers too
    found = re.search(r"\[\[\[(.*)\]\]\]", shown, re.DOTALL)
    assert process.returncode == 0 and found is not None, said[-2000:] + shown[-2000:]
    laid_out: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    return laid_out
