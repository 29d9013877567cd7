"""The files that launchd and systemd get, and the state that they report."""

import os
import plistlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.services.managed_service import (
    UNIT,
    Manager,
    Service,
    State,
    launchd_state,
    logs_named,
    property_list,
    systemd_state,
    unit,
)

RUNS = State(loaded=True, enabled=True, running=True, pid=7, detail="active (running)")


def service(**changes: Any) -> Service:
    fields: dict[str, Any] = {
        "command": ("/bin/sh", "-m", "x", "--name", "studio", "--state", "/s p/100%/$HOME"),
        "scope": "system", "user": "root", "logs": Path("/s p/studio/logs"),
    }  # fmt: skip
    return Service(**{**fields, **changes})


SETTINGS = (
    "Type=notify", "NotifyAccess=main", "WatchdogSec=30", "Restart=always", "RestartSec=1", "StartLimitIntervalSec=0",
    "TimeoutStopSec=120", "LimitNOFILE=65536", "UMask=0077", "NoNewPrivileges=yes", "KillMode=process",
    "OOMPolicy=continue", "User=root", "WantedBy=multi-user.target",
)  # fmt: skip


def test_the_unit_has_every_setting() -> None:
    text = unit(service()).decode()
    assert not [setting for setting in SETTINGS if setting not in text.splitlines()]
    # Where systemd looks for it: in [Unit] since 230, elsewhere it would be left alone.
    order = [text.index(word) for word in ("StartLimitIntervalSec", "[Service]", "WatchdogSec", "[Install]")]
    assert order == sorted(order)
    assert 'ExecStart=/bin/sh -m x --name studio --state "/s p/100%%/$$HOME"\n' in text
    assert logs_named(text.encode()) == Path("/s p/studio/logs")
    users = unit(service(scope="user", nice=5)).decode()
    assert "User=" not in users and {"WantedBy=default.target", "Nice=5"} <= set(users.splitlines())


def test_the_agents_environment_is_in_the_unit_as_it_was_given() -> None:
    odd = 'a "b" \\ %h $x\n\tü'
    text = unit(service(environment=(("ODD", odd), ("PATH", "/only"), ("PLAIN", "x")))).decode()
    assert 'Environment="ODD=a \\"b\\" \\\\ %%h $x\\n\\tü"\n' in text
    assert text.count("Environment=PATH=") == 1 and "Environment=PATH=/only\n" in text
    assert "Environment=PATH=/bin:/usr/local/bin:" in unit(service()).decode()


def test_the_property_list_has_every_key_and_survives_being_parsed() -> None:
    job = plistlib.loads(property_list(service(user="ada", nice=-5, environment=(("A", "ü & <b>"),))))
    logs = "/s p/studio/logs/boot.log"
    assert job == {
        "Label": "trainctl.agent",
        "ProgramArguments": ["/bin/sh", "-m", "x", "--name", "studio", "--state", "/s p/100%/$HOME"],
        "EnvironmentVariables": {"PATH": job["EnvironmentVariables"]["PATH"], "A": "ü & <b>"},
        "UserName": "ada", "Nice": -5, "RunAtLoad": True, "KeepAlive": True, "ThrottleInterval": 10, "ExitTimeOut": 120,
        "ProcessType": "Interactive", "AbandonProcessGroup": True, "LegacyTimers": True, "Umask": "0077",
        "SoftResourceLimits": {"NumberOfFiles": 65536}, "StandardOutPath": logs, "StandardErrorPath": logs,
    }  # fmt: skip
    assert "/opt/homebrew/bin" in job["EnvironmentVariables"]["PATH"].split(":")  # where macmon is
    assert job["EnvironmentVariables"]["PATH"].split(":")[0] == "/bin"  # the interpreter's own folder
    assert logs_named(property_list(service(logs=Path("/s p/a&b/logs")))) == Path("/s p/a&b/logs")
    users = plistlib.loads(property_list(service(scope="user")))
    assert "UserName" not in users and "Nice" not in users


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("scope", ["system", "user"])
def test_systemd_finds_no_fault_with_the_unit(tmp_path: Path, scope: Any) -> None:
    file, user = tmp_path / UNIT, ["--user"] if scope == "user" else []
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}

    def verify(unit: str) -> tuple[int, str]:
        file.write_text(unit)
        words = ["systemd-analyze", "verify", "--man=no", *user, str(file)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
        return done.returncode, done.stdout + done.stderr

    whole = unit(service(scope=scope, nice=5, environment=(("ODD", 'a "b" \\ %h $x\n'), ("WITH", "y z")))).decode()
    status, found = verify(whole)
    assert status == 0 and UNIT not in found, found
    assert "'KilMode'" in verify(whole.replace("KillMode=", "KilMode="))[1], "it would find a fault"


def test_what_a_manager_says_of_a_service_is_its_state() -> None:
    runs = "LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=7\nUnitFileState=enabled\n"
    assert systemd_state(runs) == RUNS
    waits = "LoadState=loaded\nActiveState=activating\nSubState=auto-restart\nMainPID=0\nUnitFileState=disabled\n"
    assert systemd_state(waits) == State(loaded=True, detail="activating (auto-restart)")
    assert systemd_state("LoadState=not-found\nActiveState=inactive\nSubState=dead\nMainPID=0\n").loaded is False
    job = "system/trainctl.agent = {\n\tstate = running\n\tpid = 4711\n\tendpoints = {\n\t\tstate = active\n\t}\n}\n"
    assert launchd_state(job) == State(True, True, True, 4711, "running")
    waiting = job.replace("state = running", "state = spawn scheduled").replace("\tpid = 4711\n", "")
    assert launchd_state(waiting) == State(True, True, False, None, "spawn scheduled")
    assert not launchd_state(None).loaded


@pytest.mark.parametrize("data", [b"", b"{}", b"<plist>", plistlib.dumps([]), plistlib.dumps({"Label": "x"})])
def test_another_programs_file_names_no_logs(data: bytes) -> None:
    assert logs_named(data) is None


def commands(steps: list[tuple[str, ...]]) -> list[str]:
    """The verb of each step, such as enable or rm."""
    return [step[0 if step[0] == "rm" else 1] for step in steps]


def test_a_service_that_is_there_and_does_not_run_is_enabled_and_started() -> None:
    systemd, launchd = Manager("system", "systemd"), Manager("system", "launchd")
    there, runs = State(loaded=True), State(True, True, True, 7, "running")
    assert commands(systemd.start_commands(there, "ada")) == ["daemon-reload", "enable", "restart"]
    assert commands(systemd.stop_commands(there, installed=True)) == ["disable", "rm", "daemon-reload"]
    assert commands(systemd.stop_commands(there, installed=False)) == ["stop", "daemon-reload"]
    assert systemd.stop_commands(State(), installed=False) == []
    assert commands(launchd.start_commands(State(), "ada")) == ["enable", "bootstrap"]
    assert commands(launchd.start_commands(runs, "ada")) == ["bootout", "enable", "bootstrap"]
    assert commands(launchd.stop_commands(runs, installed=True)) == ["bootout", "rm"]
    assert launchd.start_commands(runs, "ada")[0][-1] == "system/trainctl.agent"
