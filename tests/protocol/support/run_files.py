"""A short run file, and changes of single values."""

from typing import Any


def good() -> dict[str, Any]:
    return {
        "run": {"name": "sft-1b", "steps": 100},
        "model": {"path": "model"},
        "data": {"path": "data"},
        "batch": {"global": 24},
        "optimizer": {"learning_rate": 1e-3},
    }


def with_value(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    *tables, name = key.split(".")
    target = raw
    for table in tables:
        target = target.setdefault(table, {})
    target[name] = value
    return raw
