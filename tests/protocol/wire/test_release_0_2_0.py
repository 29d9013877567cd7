"""Release 0.2.0 understands every message of this version but those that it lacks, and is understood.

That agents of both share a live run is tested in tests/integration/test_release_0_2_0.py.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgpack
import msgspec
from tests.conftest import ROOT
from tests.waiting import HANG_SECONDS

from trainctl.protocol.wire import codec

RELEASE = ROOT / "tests" / "golden" / "release-0.2.0"
VECTORS = ROOT / "tests" / "golden" / "wire.jsonl"
LATER = {
    "record-request", "record-part", "dry-run-request", "dry-run", "hook-test-request", "hook-test", "edit-run",
    "run-edited",
}  # fmt: skip
"""Questions of clients, and their answers, that 0.2.0 lacks; it refuses them as unknown."""
DECODE = """
import json, sys
from trainctl.protocol.wire import codec

decode = {
    "lead to follower": codec.decode_control,
    "follower to lead": codec.decode_peer,
    "kept by followers": codec.decode_kept,
    "agent to trainer": codec.decode_order,
    "trainer to agent": codec.decode_answer,
    "client to agent": codec.decode_control,
    "agent to client": codec.decode_reply,
    "published by an agent": codec.decode_live,
}
"""
AGAIN = """
for row in map(json.loads, open(sys.argv[1])):
    try:
        said = codec.encode(decode[row["conversation"]](bytes.fromhex(row["frame"]))).hex()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps(said))
"""
"""Gives what 0.2.0 sends of every message that it takes."""


def test_each_message_is_understood_by_0_2_0_and_from_it(tmp_path: Path) -> None:
    """It leaves out the fields that it lacks; here they have their defaults, as the examples do."""
    for wheel in RELEASE.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path)
    libraries = Path(msgspec.__file__).parents[1], Path(msgpack.__file__).parents[1]
    path = os.pathsep.join(map(str, (tmp_path, *libraries)))
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", DECODE + AGAIN, VECTORS], env={"PYTHONPATH": path}, capture_output=True,
        text=True, timeout=HANG_SECONDS, check=True,
    )  # fmt: skip
    names: dict[str, Any] = {}
    exec(DECODE, names)
    refused, among_agents = set(), set()
    said = map(json.loads, done.stdout.splitlines())
    for row, frame in zip(map(json.loads, VECTORS.read_text("utf-8").splitlines()), said, strict=True):
        if frame.startswith("ProtocolError: Invalid value"):
            refused.add(row["message"]["type"])
            continue
        message = names["decode"][row["conversation"]](bytes.fromhex(frame))
        assert codec.encode(message).hex() == row["frame"], row["name"]
        among_agents.add(row["conversation"])
    assert refused == LATER
    assert {"lead to follower", "follower to lead", "kept by followers", "agent to trainer"} < among_agents
