"""The fixtures of the tests of machines, and the report that `make hardware` writes: one file of JSON to share."""

import json
import platform
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from tests.hardware.redaction import redacted_value, redactor
from tests.integration.conftest import agent, cluster, three_agents
from tests.second_chance import REAL_PROCESSES
from tests.trainer.conftest import assets, fork_servers, gpu_as_found, new_ranks, new_rig, run_file

from trainctl.protocol.machine.devices import read_devices
from trainctl.protocol.machine.facts import installed_version

__all__ = [
    "agent", "assets", "cluster", "fork_servers", "gpu_as_found", "new_ranks", "new_rig", "run_file", "three_agents",
]  # fmt: skip
_LIBRARIES = ("trainctl", "torch", "mlx", "mlx-lm", "transformers", "bitsandbytes", "nvidia-ml-py")
_tests: list[dict[str, Any]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hardware-report", type=Path, help="write the outcomes and figures of tests/hardware there")


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Print and report measured values by name, with their unit in the name."""

    def report(**values: object) -> None:
        for name, value in values.items():
            print(f"{name}: {value}")
            record_property(name, value)

    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        error = "\n".join(str(report.longrepr).strip().splitlines()[-5:]) if report.outcome != "passed" else ""
        name = item.nodeid.removeprefix("tests/hardware/")
        _tests.append({
            "test": name, "outcome": report.outcome, "seconds": round(report.duration, 2), "error": error,
            "figures": {key: value for key, value in report.user_properties if key != REAL_PROCESSES},
        })  # fmt: skip
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    file: Path | None = session.config.getoption("--hardware-report", None)
    if file is None:
        return
    about = {
        "system": platform.system(), "release": platform.release(), "machine": platform.machine(),
        "python": platform.python_version(), "libraries": {name: installed_version(name) for name in _LIBRARIES},
        "devices": [f"{device.backend} {device.device}" for device in read_devices()],
    }  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    report = redacted_value({**about, "tests": _tests}, redactor())
    file.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (file := config.getoption("--hardware-report", None)) is not None:
        terminalreporter.write_line(f"wrote {file}, without names of this machine and its users: please share it")
