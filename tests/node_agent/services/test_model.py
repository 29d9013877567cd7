"""The files that launchd and systemd get, and the state that they report."""

import os
import plistlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.services import launchd, systemd
from trainctl.node_agent.services.model import Service, State, UntilFails
from trainctl.node_agent.services.output import step_line

FILE = Path("/somewhere/of/ours")
RUNS = State(loaded=True, enabled=True, running=True, pid=7, detail="active (running)")


def service(**changes: Any) -> Service:
    fields: dict[str, Any] = {
        "node": "studio", "command": ("/bin/sh", "-m", "x", "--name", "studio", "--state", "/s p/100%/$HOME"),
        "scope": "system", "user": "root", "logs": Path("/s p/studio/logs"),
    }  # fmt: skip
    return Service(**{**fields, **changes})


SETTINGS = (
    "Type=notify", "NotifyAccess=main", "WatchdogSec=30", "Restart=always", "RestartSec=1", "StartLimitIntervalSec=0",
    "TimeoutStopSec=120", "LimitNOFILE=65536", "UMask=0077", "NoNewPrivileges=yes", "KillMode=process",
    "OOMPolicy=continue", "User=root", "WantedBy=multi-user.target",
)  # fmt: skip


def test_the_unit_has_every_setting() -> None:
    unit = systemd.unit(service())
    assert not [setting for setting in SETTINGS if setting not in unit.splitlines()]
    # Where systemd looks for it: in [Unit] since 230, elsewhere it would be left alone.
    order = [unit.index(word) for word in ("StartLimitIntervalSec", "[Service]", "WatchdogSec", "[Install]")]
    assert order == sorted(order)
    assert 'ExecStart=/bin/sh -m x --name studio --state "/s p/100%%/$$HOME"\n' in unit
    assert systemd.installed(unit.encode()) == ("studio", Path("/s p/studio/logs"))
    assert systemd.installed(b"\xff[X-Trainctl]\nNode=a\n") is None
    users = systemd.unit(service(scope="user", nice=5))
    assert "User=" not in users and {"WantedBy=default.target", "Nice=5"} <= set(users.splitlines())


def test_the_agents_environment_is_in_the_unit_as_it_was_given() -> None:
    odd = 'a "b" \\ %h $x\n\tü'
    unit = systemd.unit(service(environment=(("ODD", odd), ("PATH", "/only"), ("PLAIN", "x"))))
    assert 'Environment="ODD=a \\"b\\" \\\\ %%h $x\\n\\tü"\n' in unit
    assert unit.count("Environment=PATH=") == 1 and "Environment=PATH=/only\n" in unit
    assert "Environment=PATH=/bin:/usr/local/bin:" in systemd.unit(service())


def test_the_property_list_has_every_key_and_survives_being_parsed() -> None:
    job = launchd.parsed(launchd.plist(service(user="ada", nice=-5, environment=(("A", "ü & <b>"),))))
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
    assert launchd.installed(launchd.plist(service())) == ("studio", Path("/s p/studio/logs"))
    users = launchd.parsed(launchd.plist(service(scope="user")))
    assert "UserName" not in users and "Nice" not in users


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("scope", ["system", "user"])
def test_systemd_finds_no_fault_with_the_unit(tmp_path: Path, scope: Any) -> None:
    file, user = tmp_path / systemd.NAME, ["--user"] if scope == "user" else []
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}

    def verify(unit: str) -> tuple[int, str]:
        file.write_text(unit)
        words = ["systemd-analyze", "verify", "--man=no", *user, str(file)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
        return done.returncode, done.stdout + done.stderr

    whole = systemd.unit(service(scope=scope, nice=5, environment=(("ODD", 'a "b" \\ %h $x\n'), ("WITH", "y z"))))
    status, found = verify(whole)
    assert status == 0 and systemd.NAME not in found, found
    assert "'KilMode'" in verify(whole.replace("KillMode=", "KilMode="))[1], "it would find a fault"


def test_what_a_manager_says_of_a_service_is_its_state() -> None:
    runs = "LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=7\nUnitFileState=enabled\n"
    assert systemd.state(runs) == RUNS
    waits = "LoadState=loaded\nActiveState=activating\nSubState=auto-restart\nMainPID=0\nUnitFileState=disabled\n"
    assert systemd.state(waits) == State(loaded=True, detail="activating (auto-restart)")
    assert systemd.state("LoadState=not-found\nActiveState=inactive\nSubState=dead\nMainPID=0\n").loaded is False
    job = "system/trainctl.agent = {\n\tstate = running\n\tpid = 4711\n\tendpoints = {\n\t\tstate = active\n\t}\n}\n"
    disabled = 'disabled services = {\n\t"com.x" => disabled\n\t"trainctl.agent" => enabled\n}\n'
    assert launchd.state(job, disabled) == State(True, True, True, 4711, "running")
    waiting = job.replace("state = running", "state = spawn scheduled").replace("\tpid = 4711\n", "")
    assert launchd.state(waiting, "") == State(True, True, False, None, "spawn scheduled")
    for word in ("disabled", "true"):  # since macOS 13, and before
        assert not launchd.state(None, disabled.replace("enabled", word)).enabled


@pytest.mark.parametrize(("grace", "seconds"), [("60.0", 120), ("110.5", 126)])
def test_an_agent_that_drains_its_node_is_not_killed_within_its_grace(grace: str, seconds: int) -> None:
    drains = service(command=("/bin/sh", "--drain-on-term", "--grace", grace))
    data = launchd.plist(drains)
    assert f"TimeoutStopSec={seconds}" in systemd.unit(drains).splitlines()
    assert plistlib.loads(data)["ExitTimeOut"] == seconds
    *_, gone, _ = launchd.uninstall_steps("system", FILE, data, RUNS, 0)
    assert isinstance(gone, UntilFails) and gone.seconds == seconds + 10.0


@pytest.mark.parametrize("data", [b"", b"{}", b"<plist>", plistlib.dumps([]), plistlib.dumps({"Label": "x"})])
def test_what_is_no_job_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a property list|not a launchd job"):
        launchd.parsed(data)
    assert launchd.installed(data) is None


def test_a_service_that_is_there_and_does_not_run_is_enabled_and_started() -> None:
    wanted, at = service(), "system/trainctl.agent"
    unit, job, stopped = systemd.unit(wanted).encode(), launchd.plist(wanted), State(loaded=True)
    steps = {
        ("enable", "start"): systemd.install_steps(wanted, FILE, unit, stopped, lingering=False),
        ("enable", "bootstrap"): launchd.install_steps(wanted, FILE, job, State(detail="not loaded"), 0),
        ("kickstart",): launchd.install_steps(wanted, FILE, job, State(True, True), 0),
        ("disable", "remove", "daemon-reload"): systemd.uninstall_steps("system", FILE, unit, stopped),
        ("bootout", "wait", "remove"): launchd.uninstall_steps("system", FILE, job, State(True, True, True, 7), 0),
    }
    for words, found in steps.items():
        lines = [step_line(step) for step in found]
        assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines, strict=True)), lines
    assert step_line(steps["enable", "bootstrap"][0]) == f"launchctl enable {at}"
