"""The screens that have a name, each loaded and made when it is first shown: the program starts without the others."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from textual.screen import Screen

KINDS: Final = {
    "overview": "OverviewScreen", "runs": "RunsScreen", "charts": "ChartsScreen", "events": "EventsScreen",
    "alerts": "AlertsScreen", "node": "NodeScreen", "logs": "LogsScreen", "samples": "SamplesScreen",
    "policies": "PoliciesScreen", "calibration": "CalibrationScreen", "diagnosis": "DiagnosisScreen",
    "step_profile": "StepProfileScreen",
}  # fmt: skip
"""By name, in the module of that name."""


def _kind(name: str) -> Any:
    return getattr(importlib.import_module(f"trainctl.tui.screens.{name}"), KINDS[name])


def _made(name: str) -> Screen[Any]:
    screen: Screen[Any] = _kind(name)(name=name)
    return screen


def makers() -> dict[str, Callable[[], Screen[Any]]]:
    """What makes each screen."""
    return {name: partial(_made, name) for name in KINDS}


def load_all() -> None:
    """For what asks all screens for their bindings."""
    for name in KINDS:
        _kind(name)
