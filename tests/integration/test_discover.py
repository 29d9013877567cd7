"""An agent that advertises itself is found by `trainctl cluster discover`, over real multicast sockets on loopback."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.support.ports import free_addresses
from tests.tui.support.cli_calls import call_json
from tests.waiting import HANG_SECONDS

from trainctl.protocol.messages.base import PROTOCOL_VERSION


@pytest.mark.tier("test")
def test_an_agent_that_advertises_itself_is_found(tmp_path: Path) -> None:
    (address,) = free_addresses(1)
    file = tmp_path / "cluster.toml"
    file.write_text(f'advertise = true\n[nodes.loud]\naddress = "{address}"\n')
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "run", "--no-keys", "--name", "loud"]
    command += ["--cluster", str(file)]
    with subprocess.Popen([*command, "--state", str(tmp_path)], stdout=subprocess.PIPE) as agent:
        try:
            assert agent.stdout is not None and agent.stdout.readline()
            for _ in range(10):
                found = call_json("cluster", "discover", "--cluster", file, "--seconds", "2")["found"]
                mine = [one for one in found if one["node"] == "loud"]
                if mine:
                    break
            (told,) = mine
            assert (told["address"], told["standing"]) == (address, "in the cluster file")
            assert told["protocol"] == str(PROTOCOL_VERSION)
        finally:
            agent.terminate()
            assert agent.wait(HANG_SECONDS) == 0
