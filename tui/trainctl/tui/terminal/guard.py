"""Guard of Textual's private parts: those of versions that were tried may be used, as far as they are still there.

With any other Textual each feature that needs them is off, and the program draws the way Textual does: slower, but
right.
"""

import dis
import functools
import importlib
from pathlib import Path
from types import FunctionType
from typing import Any, Final, Literal

import textual

TRIED: Final = ("8.2.",)
"""Beginnings of the versions of Textual whose private parts were tried."""

Feature = Literal["partial update", "styles cache"]
PARTS: Final[dict[Feature, dict[str, tuple[str, ...]]]] = {
    "partial update": {
        "textual.app:App": ("_display",),
        "textual._compositor:CompositorUpdate": ("render_segments",),
        "textual._compositor:ChopsUpdate": ("chop_ends", "chops", "spans"),
    },
    "styles cache": {"textual._styles_cache:StylesCache": ("get_inner_outer",)},
}
"""Classes by the feature that uses their parts, with those parts: methods, and what they set on their objects."""


@functools.cache
def allows(feature: Feature) -> bool:
    """Return whether the feature may use its parts of the Textual that is installed."""
    return version().startswith(TRIED) and all(_has(name, parts) for name, parts in PARTS[feature].items())


def fallback() -> str:
    """Return a line about a Textual whose private parts are not all used; empty where they are."""
    said = f"Textual {version()} is not fully supported: screens are drawn slower"
    return said if not all(map(allows, PARTS)) else ""


def version() -> str:
    """Return the version of Textual by its metadata folder's name: importing importlib.metadata takes 0.03 s."""
    folders = [*Path(textual.__file__).parents[1].glob("textual-*.dist-info")]
    return folders[0].stem.removeprefix("textual-") if len(folders) == 1 else textual.__version__


def _has(name: str, parts: tuple[str, ...]) -> bool:
    module, _, attribute = name.partition(":")
    try:
        kind: type[Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        return False
    return all(hasattr(kind, part) or _sets(kind, part) for part in parts)


def _sets(kind: type[Any], part: str) -> bool:
    codes = [
        item.__code__ for parent in kind.__mro__ for item in vars(parent).values() if isinstance(item, FunctionType)
    ]
    naming = (code for code in codes if part in code.co_names)
    return any(
        step.opname == "STORE_ATTR" and step.argval == part for code in naming for step in dis.get_instructions(code)
    )
