"""The command line against a peer that speaks otherwise than an agent: exit code 5 and one line."""

from typing import Any

import msgspec
import pytest
from tests.tui.support.cli_calls import assert_one_line, call, call_json
from tests.tui.support.scripted import SNAPSHOT, scripted
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.wire import codec
from trainctl.tui.cli import agent_call

RUNS: Any = examples.EXAMPLES["agent to client"]["runs"]
OTHER_REPLY: Any = examples.EXAMPLES["agent to client"]["history"]


def in_version_1(request: m.ClientRequest) -> bytes:
    return codec.encode(msgspec.structs.replace(RUNS, rid=request.rid)).replace(b"\xa1v\x02", b"\xa1v\x01")


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        (lambda request: [in_version_1(request)], "version", "protocol version 1 is not supported"),
        (lambda request: [b"\xc1\x00garbage"], "protocol", "not a msgpack message"),
        (lambda request: [OTHER_REPLY], "protocol", "expected Snapshot, received History"),
        (lambda request: [], "unreachable", "no answer from tcp://127.0.0.1:"),
    ],
    ids=["version", "garbage", "another reply", "silence"],
)
def test_a_peer_that_is_not_right_is_exit_code_5(
    monkeypatch: pytest.MonkeyPatch, answer: Any, code: str, says: str
) -> None:
    if code == "unreachable":
        monkeypatch.setattr(agent_call, "ANSWER_SECONDS", 0.2)
    with scripted(answer) as agent:
        assert_one_line(call("ls", "--connect", agent.address), 5, says)
        assert call_json("ls", "--connect", agent.address, status=5)["error"]["code"] == code


def test_the_right_answer_is_shown() -> None:
    idle = msgspec.structs.replace(SNAPSHOT, run=None)
    with scripted(lambda request: [RUNS if isinstance(request, m.RunsRequest) else idle]) as agent:
        assert "sft-1b-20261120-143107-9f3c  running  121/60,000" in call("ls", "--connect", agent.address).stdout
