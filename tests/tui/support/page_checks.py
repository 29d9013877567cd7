"""Checks for every HTML page of a report, read from its text alone."""

import re
from html.parser import HTMLParser
from typing import Any

VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})
EMPTY_IN_SVG = frozenset({"path", "rect", "circle"})
LEAST_TEXT, LEAST_GRAPHIC = 4.5, 3.0
"""Least contrast of text and of lines (WCAG 2.2, 1.4.3 and 1.4.11)."""
_TEXT_CELL = 6.6
"""Units of a view box that a character of a label takes, roughly."""


class Page(HTMLParser):
    """A page taken apart. Raises AssertionError where a tag isn't closed, or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.drawings: list[list[tuple[str, dict[str, str | None]]]] = []
        self.titles: list[str] = []  # the first of each drawing
        self.style = ""
        self.text = ""
        self._label = (0.0, "")  # x and anchor of the label that is open
        self.labels: list[tuple[float, str, str, float]] = []  # x, anchor, text, width of its drawing
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        found = dict(attrs)
        assert len(found) == len(attrs), f"an attribute twice: {tag} {attrs}"
        self.tags.append((tag, found))
        if tag == "svg":
            self.drawings.append([])
        if "svg" in (*self.open, tag):
            self.drawings[-1].append((tag, found))
        if tag == "text":
            self._label = float(found["x"]), found.get("text-anchor") or "start"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        assert tag in EMPTY_IN_SVG, tag
        self.tags.append((tag, dict(attrs)))
        self.drawings[-1].append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> within {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        inner = self.open[-1] if self.open else ""
        if inner == "style":
            self.style += data
        elif inner == "title" and "svg" in self.open and len(self.titles) < len(self.drawings):
            self.titles.append(data)
        elif inner == "text":
            width = float(str(self.drawings[-1][0][1]["viewbox"]).split()[2])
            self.labels.append((*self._label, data, width))
        else:
            self.text += data


def check(text: str) -> Page:
    """Well-formed, self-contained, without script, each drawing titled and within its view box."""
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base"})
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        for name in ("href", "src", "action", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len({*ids})
    links = {(attributes.get("href") or "#").removeprefix("#") for tag, attributes in page.tags if tag == "a"}
    assert links <= {*ids}
    assert "@import" not in page.style and "url(" not in page.style
    assert len(page.titles) == len(page.drawings) and all(page.titles)
    for drawing in page.drawings:
        assert drawing[1][0] == "title"
        _check_within(drawing)
    for x, anchor, label, width in page.labels:
        size = _TEXT_CELL * len(label)
        start = x - (size if anchor == "end" else size / 2 if anchor == "middle" else 0)
        assert start >= 0 and start + size <= width + 1, (label, x, anchor, width)
    _check_contrast(page.style)
    return page


def _check_within(drawing: list[tuple[str, dict[str, str | None]]]) -> None:
    """Every x is within the view box; every y too, but for what a clip path cuts off."""
    _, _, width, height = map(float, str(drawing[0][1]["viewbox"]).split())
    for tag, found in drawing:
        if tag == "path":
            points = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", str(found["d"]))
            assert points, found
            xs = [float(x) for x, _ in points] + [float(x) for x in re.findall(r"H(-?[\d.]+)", str(found["d"]))]
            assert min(xs) >= 0 and max(xs) <= width, (min(xs), max(xs))
            ys = [float(y) for _, y in points]
            assert "band" in str(found.get("class")) or (min(ys) >= 0 and max(ys) <= height), (min(ys), max(ys))


def _check_contrast(style: str) -> None:
    """In the light and in the dark scheme."""
    light, dark = re.findall(r":root\{((?:--\w+:#\w{6};)+)\}", style)
    assert style.index("prefers-color-scheme:dark") < style.index(dark)
    for scheme in (light, dark):
        colors = dict(re.findall(r"--(\w+):(#\w{6});", scheme))
        for name in ("text", "dim", "mark", "c0"):  # c0: links
            assert contrast(colors[name], colors["page"]) >= LEAST_TEXT, name
        assert contrast(colors["text"], colors["head"]) >= LEAST_TEXT
        for name in ("saved", *(f"c{at}" for at in range(9))):
            assert contrast(colors[name], colors["page"]) >= LEAST_GRAPHIC, name


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' relative luminances (WCAG 2.2)."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
