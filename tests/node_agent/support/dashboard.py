"""Queries of the dashboard that comes with the exporter."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = json.loads((ROOT / "examples/grafana/trainctl.json").read_text(encoding="utf-8"))


def queries() -> list[str]:
    """Every query of the dashboard."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    found += [entry["expr"] for entry in DASHBOARD["annotations"]["list"]]
    return found + [entry["definition"] for entry in DASHBOARD["templating"]["list"] if entry["type"] == "query"]
