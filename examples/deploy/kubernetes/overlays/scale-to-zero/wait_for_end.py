"""`python3 wait_for_end.py SECONDS`: waits until a run has ended, asking all agents of the cluster file every SECONDS.

One answer isn't enough: an agent that can't reach its run's lead says only what it knew last. So all agents must answer
that no run is active, several times in a row. An agent that doesn't answer counts as one with an active run.
"""

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainctl.protocol.messages import ACTIVE_RUN_STATES

POLLS = 3
"""In a row that must find the run ended."""
ANSWER_SECONDS = 60.0
"""Seconds that an agent has to answer."""


def status_of(address: str) -> Mapping[str, Any] | None:
    """Return one agent's status; None if it doesn't answer."""
    command = ["trainctl", "status", "--json", "--connect", address]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=ANSWER_SECONDS, check=True)
        answer: Mapping[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return answer


def has_ended(answers: Sequence[Mapping[str, Any] | None]) -> bool:
    """Return True if all agents answer, at least one knows a run, and none has an active one."""
    runs = [answer["run"] for answer in answers if answer is not None]
    known = [run for run in runs if run is not None]
    return len(runs) == len(answers) and bool(known) and all(run["state"] not in ACTIVE_RUN_STATES for run in known)


def main() -> None:
    """Return once the run has ended."""
    nodes = tomllib.loads(Path(os.environ["TRAINCTL_CLUSTER"]).read_text("utf-8"))["nodes"]
    addresses = [node["address"] for node in nodes.values()]
    in_a_row = 0
    while True:
        in_a_row = in_a_row + 1 if has_ended([status_of(address) for address in addresses]) else 0
        if in_a_row == POLLS:
            return
        time.sleep(float(sys.argv[1]))


if __name__ == "__main__":
    main()
