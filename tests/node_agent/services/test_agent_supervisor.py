"""Where `trainctl-agent run` starts a supervisor."""

import pytest

from trainctl.node_agent.__main__ import has_service_manager

PID, SHELL = 4242, 4000


@pytest.mark.parametrize(
    ("environment", "pid", "parent", "managed"),
    [
        ({}, PID, SHELL, False),
        ({}, PID, 1, False),  # started in the background by a shell that has ended
        ({"NOTIFY_SOCKET": "/run/systemd/notify"}, PID, 1, True),
        ({"INVOCATION_ID": "0c1f", "SYSTEMD_EXEC_PID": str(PID)}, PID, 1, True),
        ({"INVOCATION_ID": "0c1f"}, PID, 1, True),  # systemd before 248
        ({"INVOCATION_ID": "0c1f", "SYSTEMD_EXEC_PID": "3000"}, PID, SHELL, False),  # in a desktop's terminal
        ({"XPC_SERVICE_NAME": "trainctl.agent"}, PID, 1, True),
        ({"XPC_SERVICE_NAME": "0"}, PID, SHELL, False),  # in Terminal
        ({"XPC_SERVICE_NAME": "application.com.googlecode.iterm2"}, PID, SHELL, False),
        ({}, 1, 0, True),  # a container's first process
    ],
)
def test_service_managers_are_recognised(environment: dict[str, str], pid: int, parent: int, managed: bool) -> None:
    assert has_service_manager(environment, pid, parent) == managed
