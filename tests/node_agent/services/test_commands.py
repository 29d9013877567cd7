"""`trainctl-agent install`, `status` and `uninstall` as they are typed, with managers that note what they are told."""

import json
import os
import plistlib
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.node_agent.support.managers import Managers
from tests.node_agent.support.processes import ENVIRONMENT
from tests.waiting import HANG_SECONDS

from trainctl.node_agent import cli
from trainctl.node_agent.services import managed_service as machines
from trainctl.node_agent.services import service_commands
from trainctl.node_agent.services.managed_service import Manager, ManagerError, NoManagerError, call, manager_here

RELOAD, ENABLE = "systemctl --user daemon-reload", "systemctl --user enable trainctl-agent.service"
RESTART = "systemctl --user restart trainctl-agent.service"
DISABLE = "systemctl --user disable --now trainctl-agent.service"


@pytest.fixture
def managers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Managers:
    made = Managers(tmp_path)
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "TRAINCTL_STATE", "TRAINCTL_KEYS", "TRAINCTL_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(made.home)
    return made


class Typed:
    """Types command lines of the agent, for this user's services or, with an empty `scope`, the machine's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(
        self, *words: str, manager: str = "systemd", scope: tuple[str, ...] = ("--user",)
    ) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        words = (words[0], *scope, "--manager", manager, *words[1:])
        self._monkeypatch.setattr(sys, "argv", ["trainctl-agent", *words])
        status = cli.main()
        out, err = self._capsys.readouterr()
        return status, out, err

    def json(self, *words: str, status: int = 0, **options: Any) -> dict[str, Any]:
        code, out, err = self(*words, "--json", **options)
        assert code == status, out + err
        found = json.loads(out)
        assert found["ok"] is (status in (0, 3, 4))
        return dict(found)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed(monkeypatch, capsys)


def test_systemd_from_install_to_uninstall(managers: Managers, typed: Typed) -> None:
    (managers.folder / "may-linger").touch()
    shown = typed.json("install", "--name", "studio", "--dry-run")
    assert managers.calls() == [] and not managers.unit.exists()
    first = typed.json("install", "--name", "studio")
    calls = managers.calls()
    assert calls[:3] == [RELOAD, ENABLE, RESTART] and calls[3].startswith("loginctl enable-linger ")
    assert shown["content"] == managers.unit.read_text() and shown["steps"] == first["steps"]
    assert [step for step in first["steps"] if not step.startswith("write")] == calls
    assert managers.unit.stat().st_mode & 0o777 == 0o644
    log = managers.home / ".local/state/trainctl/studio/logs/agent.log"
    assert (first["changed"], first["running"], first["enabled"], first["log"]) == (True, True, True, str(log))
    assert f"ExecStart={sys.executable} -P -m trainctl.node_agent.cli run --name studio" in shown["content"]

    again = typed.json("install", "--name", "studio")
    assert (again["changed"], again["steps"], managers.calls()) == (False, [], [])
    found = typed.json("status")
    assert found["installed"] and found["node"] == "studio" and found["pid"] == os.getpid() and found["since"]
    assert (found["service"], found["file"]) == ("trainctl-agent.service", str(managers.unit))

    other = typed.json("install", "--name", "studio", "--nice", "5", "--env", "A=b c")
    assert other["changed"] is True and managers.calls()[:3] == [RELOAD, ENABLE, RESTART]
    assert {"Nice=5", 'Environment="A=b c"'} <= set(managers.unit.read_text().splitlines())

    gone = typed.json("uninstall")
    assert managers.calls() == [DISABLE, RELOAD]
    assert not managers.unit.exists() and gone["state"] == str(managers.home / ".local/state/trainctl")
    assert typed.json("uninstall")["changed"] is False and managers.calls() == []
    assert typed.json("status", status=4)["installed"] is False


def test_every_option_of_run_is_taken_checked_and_made_to_hold_from_anywhere(managers, typed, monkeypatch):
    (managers.home / "c.toml").write_text('[nodes.studio]\naddress = "tcp://127.0.0.1:7474"\n')
    monkeypatch.setenv("TRAINCTL_KEYS", "/my/keys")
    words = ["--name", "studio", "--cluster", "c.toml", "--state", "st ate", "--listen", "tcp://127.0.0.1:9"]
    content = typed.json("install", "--dry-run", *words, "--alert-command", "say 100%")["content"]
    (command,) = [line for line in content.splitlines() if line.startswith("ExecStart=")]
    assert command.partition(" run ")[2] == (
        f'--name studio --state "{managers.home}/st ate" --cluster {managers.home}/c.toml --listen tcp://127.0.0.1:9 '
        '--alert-command "say 100%%"'
    )
    assert "Environment=TRAINCTL_KEYS=/my/keys\n" in content  # or the service would look elsewhere than this shell


def test_a_service_keeps_what_variables_set(managers, typed, monkeypatch):
    monkeypatch.setenv("TRAINCTL_AGENT_GRACE", "60")
    monkeypatch.setenv("TRAINCTL_AGENT_DRAIN_ON_TERM", "1")
    monkeypatch.setenv("TRAINCTL_AGENT_ADVERTISE", "0")
    content = typed.json("install", "--dry-run", "--name", "studio")["content"]
    (command,) = [line for line in content.splitlines() if line.startswith("ExecStart=")]
    assert command.endswith("/.local/state/trainctl --drain-on-term --grace 60.0")


@pytest.mark.parametrize(("grace", "seconds"), [("60", 120), ("110.5", 126), ("3600", 3615)])
def test_an_agent_that_drains_its_node_is_not_killed_within_its_grace(managers, typed, grace, seconds):
    words = ["install", "--dry-run", "--name", "studio", "--drain-on-term", "--grace", grace]
    assert f"TimeoutStopSec={seconds}" in typed.json(*words)["content"].splitlines()
    job = plistlib.loads(typed.json(*words, manager="launchd")["content"].encode())
    assert job["ExitTimeOut"] == seconds


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--name", "No Name"], "--name: 'No Name' is not a node name"),
        (["--cluster", "none.toml"], "none.toml: no such cluster file"),
        (["--leash"], "--leash: a service has no standard input"),
        (["--nice", "-5"], "--nice: a user may not set -5"),
        (["--env", "A"], "--env: 'A' is not of the form NAME=VALUE"),
        (["--run-as", "nobody-here"], "--run-as: only nobody-here can install that user's service"),
    ],
)
def test_what_cannot_be_installed_is_refused_in_a_line_and_nothing_is_done(managers, typed, words, says):
    code, out, err = typed("install", *words)
    assert (code, out) == (2, "") and err.startswith("trainctl-agent: ") and err.count("\n") == 1
    assert says in err
    assert typed.json("install", *words, status=2)["error"] == {"code": "usage", "text": err[16:-1]}
    assert managers.calls() == [] and not managers.unit.exists()


def test_a_service_that_does_not_begin_is_told_with_where_to_look(managers: Managers, typed: Typed) -> None:
    (managers.folder / "dies").touch()
    error = typed.json("install", "--name", "studio", status=1)["error"]
    assert error["code"] == "failed"
    assert error["text"].startswith(f"{RESTART}: Job for trainctl-agent.service failed")
    assert f"{managers.home}/.local/state/trainctl/studio/logs/agent.log, or journalctl" in error["text"]


def test_a_manager_that_cannot_be_reached_is_as_good_as_none_and_nothing_is_done(managers, typed):
    (managers.folder / "unreachable").touch()
    error = typed.json("install", "--name", "studio", status=7)["error"]
    assert error["code"] == "no-service-manager" and error["text"].endswith(
        ": Failed to connect to bus: No medium found"
    )
    assert managers.calls() == [] and not managers.unit.exists()
    assert typed.json("install", "--name", "studio", "--dry-run")["content"]


def test_launchd_from_install_to_uninstall(managers: Managers, typed: Typed) -> None:
    at = f"gui/{os.getuid()}"
    lacks = "note: a LaunchAgent starts at login and stops at logout, and macOS asks for Local Network permission"
    shown = typed.json("install", "--name", "studio", "--dry-run", manager="launchd")["steps"]
    assert shown[0] == f"write {managers.plist}"
    code, out, _ = typed("install", "--name", "studio", manager="launchd")
    assert code == 0 and lacks in out
    places = [
        out.index(words) for words in (f"write {managers.plist}\n    <?xml", "run launchctl enable", "\ninstalled ")
    ]
    assert places == sorted(places), "the file and the commands, before it acts, and then the state"
    begin = [f"launchctl enable {at}/trainctl.agent", f"launchctl bootstrap {at} {managers.plist}"]
    assert managers.calls() == begin
    job = plistlib.loads(managers.plist.read_bytes())
    assert job["ProgramArguments"][-2:] == ["--exit-if-stalled", "30"]
    logs = Path(job["StandardErrorPath"]).parent
    assert logs.is_dir() and logs.stat().st_mode & 0o077 == 0  # launchd makes the file, not its folder
    assert typed.json("install", "--name", "studio", manager="launchd")["changed"] is False
    assert typed.json("status", manager="launchd")["log"] == str(logs / "agent.log")
    assert typed.json("install", "--name", "studio", "--nice", "1", manager="launchd")["changed"] is True
    assert managers.calls() == [f"launchctl bootout {at}/trainctl.agent", *begin]
    assert typed.json("uninstall", manager="launchd")["changed"] is True
    assert managers.calls() == [f"launchctl bootout {at}/trainctl.agent"] and not managers.plist.exists()
    assert logs.is_dir()
    assert typed.json("status", manager="launchd", status=4)["running"] is False


def test_a_machine_without_a_manager_or_without_root_is_refused(managers, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(machines, "BOOTED", managers.home / "none")
    with pytest.raises(NoManagerError, match="neither systemd nor launchd; start `trainctl-agent run`") as caught:
        manager_here()
    assert caught.value.exit_code == 7
    monkeypatch.setattr(machines, "BOOTED", managers.home)
    assert manager_here() == "systemd"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Exception, match=r"needs root: run sudo .* -P -m trainctl.node_agent.cli"):
        Manager("system", "systemd").check_allowed()
    Manager("user", "systemd").check_allowed()
    with pytest.raises(ManagerError, match=r"systemctl dance: Unknown command verb dance\."):
        call(("systemctl", "dance"))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("systemd", "etc/systemd/system/trainctl-agent.service"),
        ("launchd", "Library/LaunchDaemons/trainctl.agent.plist"),
    ],
)
def test_a_service_of_the_machine_is_where_its_manager_looks(managers, typed, tmp_path, monkeypatch, name, place):
    file, of_machine = tmp_path / "root" / place, {"manager": name, "scope": ()}
    monkeypatch.setattr(service_commands, "Manager", partial(Manager, root=tmp_path / "root"))
    monkeypatch.setenv("UNIT", str(file))
    content = typed.json("install", "--name", "studio", "--dry-run", **of_machine)["content"]
    assert typed.json("install", "--name", "studio", **of_machine)["running"] and managers.calls()
    assert file.read_text() == content
    assert typed.json("uninstall", **of_machine)["changed"] and not file.exists()
    assert not typed.json("status", **of_machine, status=4)["running"]


def test_the_installed_command_runs_from_anywhere(managers: Managers, typed: Typed, tmp_path: Path) -> None:
    typed("install", "--name", "studio", manager="launchd")
    words = plistlib.loads(managers.plist.read_bytes())["ProgramArguments"]
    few = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ENVIRONMENT["PYTHONPATH"]}
    with subprocess.Popen(words, cwd="/", env=few, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        assert json.loads(agent.stdout.readline())["name"] == "studio"
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0
    log = (managers.home / ".local/state/trainctl/studio/logs/agent.log").read_text()
    assert " INFO started: studio at ipc:///" in log and " INFO stopped: studio at " in log
