"""What launchd and systemd get of the agent: the files, and the steps from how things are to how they should
be."""

import os
import plistlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.services import launchd, systemd
from trainctl.node_agent.services.model import Call, Folder, Remove, Service, State, UntilFails, Write
from trainctl.node_agent.services.output import step_line

FILE = Path("/somewhere/of/ours")
RUNS = State(loaded=True, enabled=True, running=True, pid=7, detail="active (running)")


def service(**changes: Any) -> Service:
    fields: dict[str, Any] = {
        "node": "studio", "command": ("/bin/sh", "-m", "x", "--name", "studio", "--state", "/s p/100%/$HOME"),
        "scope": "system", "user": "root", "logs": Path("/s p/studio/logs"),
    }  # fmt: skip
    return Service(**{**fields, **changes})


def lines(steps: Any) -> list[str]:
    return [step_line(step) for step in steps]


# ---------------------------------------------------------------- systemd


SETTINGS = (
    "Type=notify", "NotifyAccess=main", "WatchdogSec=30", "Restart=always", "RestartSec=1", "StartLimitIntervalSec=0",
    "TimeoutStopSec=120", "LimitNOFILE=65536", "UMask=0077", "NoNewPrivileges=yes", "KillMode=process",
    "OOMPolicy=continue", "User=root", "WantedBy=multi-user.target",
)  # fmt: skip


def test_the_unit_has_every_setting() -> None:
    unit = systemd.unit(service())
    assert not [setting for setting in SETTINGS if setting not in unit.splitlines()]
    # Where systemd looks for it: in [Unit] since 230, elsewhere it would be left alone.
    assert (
        unit.index("StartLimitIntervalSec") < unit.index("[Service]") < unit.index("WatchdogSec") < unit.index("[Inst")
    )
    assert "Nice=" not in unit
    assert 'ExecStart=/bin/sh -m x --name studio --state "/s p/100%%/$$HOME"\n' in unit


def test_a_users_unit_has_no_user_and_starts_with_the_session() -> None:
    unit = systemd.unit(service(scope="user", nice=5))
    assert "User=" not in unit and "network-online" not in unit
    assert {"WantedBy=default.target", "Nice=5"} <= set(unit.splitlines())


def test_the_agents_environment_is_in_the_unit_as_it_was_given() -> None:
    odd = 'a "b" \\ %h $x\n\tü'
    unit = systemd.unit(service(environment=(("ODD", odd), ("PATH", "/only"), ("PLAIN", "x"))))
    assert 'Environment="ODD=a \\"b\\" \\\\ %%h $x\\n\\tü"\n' in unit
    assert unit.count("Environment=PATH=") == 1 and "Environment=PATH=/only\n" in unit
    assert "Environment=PATH=/bin:/usr/local/bin:" in systemd.unit(service())


def test_what_an_installed_unit_says_of_itself_is_read_again() -> None:
    assert systemd.installed(systemd.unit(service()).encode()) == ("studio", Path("/s p/studio/logs"))
    assert systemd.installed(b"[Service]\nExecStart=/bin/true\n") is None
    assert systemd.installed(b"\xff[X-Trainctl]\nNode=a\n") is None


def verified(folder: Path, unit: str, scope: str) -> tuple[int, str]:
    (folder / systemd.NAME).write_text(unit)
    words = [
        "systemd-analyze",
        "verify",
        "--man=no",
        *(["--user"] if scope == "user" else []),
        str(folder / systemd.NAME),
    ]
    done = subprocess.run(
        words, env={**os.environ, "XDG_RUNTIME_DIR": str(folder)}, capture_output=True, text=True, timeout=HANG_SECONDS,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("scope", ["system", "user"])
def test_systemd_finds_no_fault_with_the_unit(tmp_path: Path, scope: Any) -> None:
    odd = (("ODD", 'a "b" \\ %h $x\n'), ("WITH", "y z"))
    whole = systemd.unit(service(scope=scope, nice=5, environment=odd))
    status, said = verified(tmp_path, whole, scope)
    assert status == 0 and systemd.NAME not in said, said
    # It would find one.
    assert "'KilMode'" in verified(tmp_path, whole.replace("KillMode=", "KilMode="), scope)[1]
    assert "/no/such" in verified(tmp_path, whole.replace("ExecStart=/bin/sh", "ExecStart=/no/such"), scope)[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=7\nUnitFileState=enabled\n", RUNS),
        ("LoadState=not-found\nActiveState=inactive\nSubState=dead\nMainPID=0\nUnitFileState=\n",
         State(detail="inactive (dead)")),
        ("LoadState=loaded\nActiveState=activating\nSubState=auto-restart\nMainPID=0\nUnitFileState=disabled\n",
         State(loaded=True, detail="activating (auto-restart)")),
        ("", State()),
    ],
)  # fmt: skip
def test_what_systemctl_says(text: str, expected: State) -> None:
    assert systemd.state(text) == expected


def test_systemd_steps_from_nothing_from_another_setting_and_from_what_is_wanted() -> None:
    wanted = service()
    same = systemd.unit(wanted).encode()
    write = f"write {FILE}"
    assert lines(systemd.install_steps(wanted, FILE, None, State(), lingering=False)) == [
        write, "systemctl daemon-reload", "systemctl enable trainctl-agent.service",
        "systemctl start trainctl-agent.service",
    ]  # fmt: skip
    changed = systemd.install_steps(service(nice=3), FILE, same, RUNS, lingering=False)
    assert lines(changed) == [write, "systemctl daemon-reload", "systemctl restart trainctl-agent.service"]
    assert systemd.install_steps(wanted, FILE, same, RUNS, lingering=False) == ()
    stopped = RUNS._replace(running=False, pid=None, enabled=False)
    assert lines(systemd.install_steps(wanted, FILE, same, stopped, lingering=False)) == [
        "systemctl enable trainctl-agent.service", "systemctl start trainctl-agent.service",
    ]  # fmt: skip


def test_a_users_service_lingers_or_says_that_it_ends_at_logout() -> None:
    wanted = service(scope="user", user="ada")
    same = systemd.unit(wanted).encode()
    (step,) = systemd.install_steps(wanted, FILE, same, RUNS, lingering=False)
    assert step == Call(
        ("loginctl", "enable-linger", "ada"),
        "the service ends at logout unless an administrator runs: loginctl enable-linger ada",
    )
    assert systemd.install_steps(wanted, FILE, same, RUNS, lingering=True) == ()
    assert (
        lines(systemd.install_steps(wanted, FILE, None, State(), lingering=True))[1] == "systemctl --user daemon-reload"
    )


def test_systemd_steps_away() -> None:
    same = systemd.unit(service()).encode()
    gone = ["systemctl disable trainctl-agent.service", f"remove {FILE}", "systemctl daemon-reload"]
    stop = "systemctl stop trainctl-agent.service"
    assert lines(systemd.uninstall_steps("system", FILE, same, RUNS)) == [stop, *gone]
    restarting = State(loaded=True, detail="activating (auto-restart)")
    assert lines(systemd.uninstall_steps("system", FILE, same, restarting)) == [stop, *gone]
    assert lines(systemd.uninstall_steps("system", FILE, same, State(loaded=True, detail="failed (failed)"))) == gone
    assert systemd.uninstall_steps("system", FILE, None, State()) == ()


# ---------------------------------------------------------------- launchd


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
    assert "EnableTransactions" not in job


@pytest.mark.parametrize(("grace", "seconds"), [("60.0", 120), ("110.5", 126), ("300.0", 315)])
def test_an_agent_that_drains_its_node_is_not_killed_within_its_grace(grace: str, seconds: int) -> None:
    drains = service(command=("/bin/sh", "--drain-on-term", "--grace", grace))
    data = launchd.plist(drains)
    assert f"TimeoutStopSec={seconds}" in systemd.unit(drains).splitlines()
    assert plistlib.loads(data)["ExitTimeOut"] == seconds
    *_, gone, _ = launchd.uninstall_steps("system", FILE, data, RUNS, 0)
    assert isinstance(gone, UntilFails) and gone.seconds == seconds + 10.0


def test_a_launch_agent_names_no_user() -> None:
    job = plistlib.loads(launchd.plist(service(scope="user")))
    assert "UserName" not in job and "Nice" not in job


@pytest.mark.parametrize("data", [b"", b"{}", b"<plist>", plistlib.dumps([]), plistlib.dumps({"Label": "x"})])
def test_what_is_no_job_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a property list|not a launchd job"):
        launchd.parsed(data)
    assert launchd.installed(data) is None


def test_what_an_installed_property_list_says_of_itself_is_read_again() -> None:
    assert launchd.installed(launchd.plist(service())) == ("studio", Path("/s p/studio/logs"))


PRINTED = """system/trainctl.agent = {
	active count = 1
	path = /Library/LaunchDaemons/trainctl.agent.plist
	type = LaunchDaemon
	state = running

	program = /bin/sh
	pid = 4711
	immediate reason = speculative
	endpoints = {
		"x" = {
			state = active
		}
	}
	runs = 1
}
"""


def test_what_launchctl_says() -> None:
    disabled = 'disabled services = {\n\t"com.x" => disabled\n\t"trainctl.agent" => enabled\n}\n'
    assert launchd.state(PRINTED, disabled) == State(True, True, True, 4711, "running")
    waiting = PRINTED.replace("state = running", "state = spawn scheduled").replace("\tpid = 4711\n", "")
    assert launchd.state(waiting, "") == State(True, True, False, None, "spawn scheduled")
    for word in ("disabled", "true"):  # since macOS 13, and before
        assert not launchd.state(None, disabled.replace("enabled", word)).enabled
    assert launchd.state(None, disabled) == State(enabled=True, detail="not loaded")


def test_launchd_steps_from_nothing_from_another_setting_and_from_what_is_wanted() -> None:
    wanted, at = service(), "system/trainctl.agent"
    same, runs = launchd.plist(wanted), State(True, True, True, 4711, "running")
    begin = ["create /s p/studio/logs, owned by root", f"write {FILE}", f"launchctl bootstrap system {FILE}"]
    assert lines(launchd.install_steps(wanted, FILE, None, State(enabled=True), 0)) == begin
    changed = launchd.install_steps(service(nice=3), FILE, same, runs, 0)
    assert lines(changed) == [
        f"launchctl bootout {at}", f"wait until this fails, at most 130 s: launchctl print {at}", *begin,
    ]  # fmt: skip
    assert launchd.install_steps(wanted, FILE, same, runs, 0) == ()
    off = State(enabled=False, detail="not loaded")
    assert lines(launchd.install_steps(wanted, FILE, same, off, 0)) == [f"launchctl enable {at}", begin[2]]
    ended = runs._replace(running=False, pid=None)
    assert lines(launchd.install_steps(wanted, FILE, same, ended, 0)) == [f"launchctl kickstart {at}"]
    agent = launchd.install_steps(service(scope="user"), FILE, None, State(enabled=True), 501)
    assert lines(agent)[2] == f"launchctl bootstrap gui/501 {FILE}"


def test_launchd_steps_away() -> None:
    same, runs, at = launchd.plist(service()), State(True, True, True, 4711, "running"), "system/trainctl.agent"
    assert launchd.uninstall_steps("system", FILE, same, runs, 0) == (
        Call(("launchctl", "bootout", at)), UntilFails(("launchctl", "print", at), 130.0), Remove(FILE),
    )  # fmt: skip
    assert launchd.uninstall_steps("system", FILE, None, State(enabled=True), 0) == ()


def test_what_is_written_is_what_is_shown() -> None:
    (folder, write, *_) = launchd.install_steps(service(), FILE, None, State(enabled=True), 0)
    assert folder == Folder(Path("/s p/studio/logs"), "root")
    assert write == Write(FILE, launchd.plist(service()))
