"""The frozen release 0.1.0 as the tests have it: unpacked, where its paths lead to, and what it says of itself."""

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

from tests.integration.conftest import AgentProcess
from tests.integration.support.packages import unpack_archive
from tests.integration.support.ports import free_addresses

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "release-0.1.0"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text("utf-8"))
RUNS: list[str] = sorted(EXPECTED["runs"])
MADE_AT = "/tmp/trainctl-0.1.0"
"""The folder that its records name."""
ADDRESSES = ("tcp://127.0.0.1:27410", "tcp://127.0.0.1:27420", "tcp://127.0.0.1:27430")
"""Where its agents were."""


def run_named(name: str) -> str:
    """The id of the run of this name."""
    return next(run for run in RUNS if run.startswith(f"{name}-2"))


def unpack(archive: str, folder: Path) -> Path:
    return unpack_archive(FOLDER / archive, folder)


class Frozen:
    """The state folder of 0.1.0 moved to a folder of the test, its agents at free addresses."""

    def __init__(self, root: Path) -> None:
        self.root, self.state, self.cluster = unpack("state.tar.xz", root), root / "state", root / "cluster.toml"
        self._relocate()
        self.agents: dict[str, AgentProcess] = {}

    def _relocate(self) -> None:
        places = {MADE_AT: str(self.root), **dict(zip(ADDRESSES, free_addresses(len(ADDRESSES)), strict=True))}
        for file in self.root.rglob("*.toml"):
            text = file.read_text("utf-8")
            for old, new in places.items():
                text = text.replace(old, new)
            file.write_text(text, "utf-8")
        for file in self.state.glob("*/agent.db"):
            with sqlite3.connect(file) as connection:
                connection.execute("UPDATE runs SET directory = replace(directory, ?, ?)", (MADE_AT, str(self.root)))
            connection.close()

    def directory(self, run: str, node: str = "alpha") -> Path:
        return self.state / node / "runs" / run

    def start(self, *nodes: str) -> None:
        for node in nodes:
            self.agents[node] = AgentProcess(self.state, node, self.cluster, self.keys(node))
            self.agents[node].start()

    def keys(self, name: str) -> Path:
        return self.root / "keys" / name

    def environment(self, keys: str = "alpha") -> dict[str, str]:
        """For the command line: whose keys, and where everything is."""
        return {
            "TRAINCTL_KEYS": str(self.keys(keys)), "TRAINCTL_CLUSTER": str(self.cluster),
            "TRAINCTL_STATE": str(self.state),
        }  # fmt: skip

    def close(self) -> None:
        for agent in self.agents.values():
            agent.clean_up()
        shutil.rmtree(self.root, ignore_errors=True)
