"""The agent as a systemd unit: its text, what systemctl says of it, and the steps that install and remove it."""

import re
from pathlib import Path

from trainctl.node_agent.services import model

NAME = "trainctl-agent.service"
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_OWN = "X-Trainctl"
"""Section that systemd ignores."""
_ASKED = "LoadState,ActiveState,SubState,MainPID,UnitFileState"


def unit(service: model.Service) -> str:
    """The unit file."""
    system = service.scope == "system"
    lines = ["[Unit]", f"Description=trainctl node agent {service.node}"]
    # An address of a network interface can be listened at only once it is there.
    lines += ["Wants=network-online.target", "After=network-online.target"] if system else []
    lines += ["StartLimitIntervalSec=0", "", "[Service]", *_settings(service)]
    lines += ["", "[Install]", f"WantedBy={'multi-user' if system else 'default'}.target"]
    lines += ["", f"[{_OWN}]", f"Node={service.node}", f"Logs={service.logs}"]
    return "\n".join(lines) + "\n"


def _settings(service: model.Service) -> list[str]:
    command = " ".join(quoted(word).replace("$", "$$") for word in service.command)
    lines = ["Type=notify", "NotifyAccess=main", f"ExecStart={command}"]
    lines += [f"User={service.user}"] if service.scope == "system" else []
    lines += [
        "Restart=always", "RestartSec=1", f"TimeoutStopSec={service.stop_seconds}",
        f"WatchdogSec={model.WATCHDOG_SECONDS}",
        # Trainers live in the service's control group, and outlive a restart; one that the kernel ends for lack of
        # memory is the agent's business, and no reason to stop it.
        "KillMode=process", "OOMPolicy=continue",
        f"LimitNOFILE={model.OPEN_FILES}", "UMask=0077", "NoNewPrivileges=yes",
    ]  # fmt: skip
    lines += [f"Nice={service.nice}"] if service.nice is not None else []
    given = model.variables(service, "systemd").items()
    return lines + [f"Environment={quoted(f'{name}={value}')}" for name, value in given]


def quoted(word: str) -> str:
    """A word as a unit file has it: in quotes where it needs them, without specifiers."""
    for raw, written in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t"), ("%", "%%")):
        word = word.replace(raw, written)
    return word if _PLAIN.fullmatch(word) else f'"{word}"'


def installed(data: bytes) -> model.Installed | None:
    """What a unit file of ours says of itself; None for another's."""
    own = data.decode(errors="replace").partition(f"[{_OWN}]\n")[2]
    known = dict(line.partition("=")[::2] for line in own.splitlines())
    return model.Installed(known["Node"], Path(known["Logs"])) if {"Node", "Logs"} <= set(known) else None


def systemctl(scope: model.Scope, *words: str) -> tuple[str, ...]:
    return ("systemctl", "--user", *words) if scope == "user" else ("systemctl", *words)


def question(scope: model.Scope) -> tuple[str, ...]:
    """The command whose output `state` reads."""
    return systemctl(scope, "show", NAME, f"--property={_ASKED}")


def linger_question(user: str) -> tuple[str, ...]:
    """The command whose output `lingers` reads; it fails for a user who neither lingers nor is logged in."""
    return "loginctl", "show-user", user, "--property=Linger"


def lingers(text: str) -> bool:
    """Whether a user's services continue without a session, as `loginctl` says."""
    return "Linger=yes" in text.splitlines()


def state(text: str) -> model.State:
    """What `systemctl show` says."""
    known = dict(line.partition("=")[::2] for line in text.splitlines())
    active, pid = known.get("ActiveState", ""), known.get("MainPID", "0")
    return model.State(
        loaded=known.get("LoadState") == "loaded",
        enabled=known.get("UnitFileState") == "enabled",
        running=active == "active",
        pid=int(pid) if pid.isdigit() and pid != "0" else None,
        detail=f"{active} ({known.get('SubState', '')})" if active else "",
    )


def install_steps(
    service: model.Service, file: Path, before: bytes | None, now: model.State, *, lingering: bool
) -> tuple[model.Step, ...]:
    """From how things are to a service that runs as the unit says; none where all is so already. `lingering`: the
    user's services continue without a session."""
    data = unit(service).encode()
    changed, scope = data != before, service.scope
    steps: list[model.Step] = (
        [model.Write(file, data), model.Call(systemctl(scope, "daemon-reload"))] if changed else []
    )
    if not now.enabled:
        steps.append(model.Call(systemctl(scope, "enable", NAME)))
    if changed or not now.running:
        steps.append(model.Call(systemctl(scope, "restart" if changed and now.loaded else "start", NAME)))
    if scope == "user" and not lingering:
        words = ("loginctl", "enable-linger", service.user)
        steps.append(model.Call(words, f"the service ends at logout unless an administrator runs: {' '.join(words)}"))
    return tuple(steps)


def uninstall_steps(scope: model.Scope, file: Path, before: bytes | None, now: model.State) -> tuple[model.Step, ...]:
    """Ends the agent, not its trainers, and forgets the unit; none where there is nothing of it."""
    steps: list[model.Step] = []
    if now.running or now.pid is not None or now.detail.startswith(("activating", "reloading")):
        steps.append(model.Call(systemctl(scope, "stop", NAME)))
    if before is not None:
        steps += [
            model.Call(systemctl(scope, "disable", NAME)),
            model.Remove(file),
            model.Call(systemctl(scope, "daemon-reload")),
        ]
    return tuple(steps)
