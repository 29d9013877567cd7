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
const shown = one => one.getClientRects().length > 0;
const within = (inner, outer) => inner.left >= outer.left - 1 && inner.right <= outer.right + 1
  && inner.top >= outer.top - 1 && inner.bottom <= outer.bottom + 1;
const apart = (one, other) => one.right <= other.left || other.right <= one.left
  || one.bottom <= other.top || other.bottom <= one.top;
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
  const wrong = [], page = document.documentElement, drawings = [...document.querySelectorAll("svg")].filter(shown);
  if (page.scrollWidth > page.clientWidth) wrong.push(`the page is ${page.scrollWidth} wide`);
  for (const svg of drawings) {
    const box = svg.getBoundingClientRect(), labels = [...svg.querySelectorAll("text")];
    const name = svg.querySelector("title").textContent;
    if (box.width < 200 || box.height < 50) wrong.push(`${name} measures ${box.width} by ${box.height}`);
    const boxes = labels.map(one => one.getBoundingClientRect());
    labels.forEach((one, at) => {
      if (!within(boxes[at], box)) wrong.push(`${name}: ${one.textContent} is cut off`);
      const met = boxes.slice(0, at).some(other => !apart(boxes[at], other));
      if (met) wrong.push(`${name}: ${one.textContent} overlaps`);
    });
  }
  for (const [node, rect] of textRects(document.body)) {
    const cell = node.parentElement.closest("td, th, li, p, blockquote, section, body").getBoundingClientRect();
    const clipped = getComputedStyle(node.parentElement).overflow === "hidden";
    if (clipped || rect.left < cell.left - 1 || rect.right > cell.right + 1) wrong.push(`cut off: ${node.data}`);
  }
  return {
    wrong, width: innerWidth, drawings: drawings.length, figures: document.querySelectorAll("figure").length,
    text: document.body.innerText.length, page: getComputedStyle(document.body).backgroundColor,
    scrolled: [...document.querySelectorAll(".scroll")].filter(one => one.scrollWidth > one.clientWidth).length,
  };
}
</script></body>"""
_WRAPPER = """<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><body>%s<script>
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(one => one.contentWindow.probe());
  document.body.textContent = `[[[${JSON.stringify(found)}]]]`;
};
</script></body>"""


def lay_out(pages: Iterable[tuple[str, int]], scheme: str, folder: Path) -> list[dict[str, Any]]:
    """What Chromium finds of each page at its width, in pixels: `wrong`, what doesn't fit; `page`, its background;
    how many drawings and figures are shown; how many tables have to be scrolled."""
    file = folder / f"{scheme}.html"
    file.write_text(_WRAPPER % "".join(_frame(page, width) for page, width in pages), "utf-8")
    found: list[dict[str, Any]] = json.loads(_dump(file, scheme, folder / "profile"))
    return found


def _frame(page: str, width: int) -> str:
    probed = html.escape(page.replace("</body>", _PROBE))
    return f'<iframe srcdoc="{probed}" style="border:0;width:{width}px;height:800px"></iframe>'


def _dump(file: Path, scheme: str, profile: Path) -> str:
    words = [
        "chromium", *FLAGS, f"--user-data-dir={profile}", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        "--dump-dom", file.as_uri(),
    ]  # fmt: skip
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
    return html.unescape(found[1])
