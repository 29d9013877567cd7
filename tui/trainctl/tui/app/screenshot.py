"""The screen as a picture: an SVG file that any browser shows."""

import re
from pathlib import Path
from typing import Any

from textual.app import App

from trainctl.protocol.errors import InvalidInputError

_SPACE = "&#160;"
_CELL = 12.2  # width of a character in Rich's SVG export, in its units
_RUN = 3
_BRAILLE = re.compile("[\u2801-\u28ff]")
_FONTS = re.compile(r"@font-face\s*\{[^}]*\}\s*")  # from a server; the viewer's own monospace does
_COMMENT = re.compile(r"<!--.*?-->\s*", re.DOTALL)
_LED = re.compile(
    rf'(<text class="[^"]*" x=")([\d.]+)(" y="[\d.]+" textLength=")([\d.]+)("[^>]*>)((?:{_SPACE})*)([^<]*)</text>'
)


def svg(app: App[Any], title: str = "trainctl") -> str:
    """Return the running app's current screen as an SVG document."""
    document = _FONTS.sub("", app.export_screenshot(title=title, simplify=False))
    return _LED.sub(_trimmed, _COMMENT.sub("", document))


def _trimmed(found: re.Match[str]) -> str:
    """Return a text without its leading and trailing spaces, begun further right: some viewers drop spaces at a text's
    start."""
    head, x, middle, length, tail, spaces, text = found.groups()
    rest = re.sub(rf"(?:{_SPACE})+$", "", text)
    lead = spaces.count(_SPACE) * _CELL
    if not _BRAILLE.search(rest):
        lost = lead + (text.count(_SPACE) - rest.count(_SPACE)) * _CELL
        return f"{head}{float(x) + lead:g}{middle}{float(length) - lost:g}{tail}{rest}</text>"
    # Fonts without braille borrow it from one of another width: short runs keep the dots in their columns.
    chars = re.findall(r"&#?\w+;|.", rest)
    return "".join(
        f"{head}{float(x) + lead + start * _CELL:g}{middle}{len(run) * _CELL:g}{tail}{''.join(run)}</text>"
        for start, run in ((start, chars[start : start + _RUN]) for start in range(0, len(chars), _RUN))
        if any(char != _SPACE for char in run)
    )


def save(app: App[Any], path: Path, title: str = "trainctl") -> Path:
    """Write the current screen to `path`. Raises InvalidInputError where it can't be written."""
    try:
        path.write_text(svg(app, title), encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(str(path), f"can't write the screenshot: {error.strerror or error}") from None
    return path
