"""`trainctl-agent install`, `uninstall` and `status`: the agent as a service of this machine."""

import contextlib
import datetime
import json as json_text
import os
import pwd
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from trainctl.node_agent.services import run_options
from trainctl.node_agent.services.service_file import BOOT_LOG, Scope, Service, content, installed_node, own_command
from trainctl.node_agent.services.service_manager import (
    Command,
    Manager,
    ManagerError,
    NoManagerError,
    State,
    call,
    manager_here,
)
from trainctl.protocol.config import env_policy, names
from trainctl.protocol.errors import InvalidInputError, NotAuthorisedError, TrainctlError

NOT_RUNNING, NOT_INSTALLED = 3, 4
"""Exit codes of `status`, the same as systemctl's."""
CARRIED = ("TRAINCTL_CLUSTER", "TRAINCTL_KEYS", "XDG_CONFIG_HOME")
"""Variables that name places: the service gets those that this shell has."""
STALL_OPTION, STALL_SECONDS = "--exit-if-stalled", 30
_STATE = {"systemd": ".local/state/trainctl", "launchd": "Library/Application Support/trainctl"}
_CODES = ((NoManagerError, "no-service-manager"), (NotAuthorisedError, "not-authorised"), (InvalidInputError, "usage"))
_NO_CHANGE = "no change: already installed with these settings and running"
_AS_ROOT = "the agent and its trainers run as root; to change the user, add --run-as"
_LAUNCH_AGENT = (
    "a LaunchAgent starts at login and stops at logout, and macOS asks for Local Network permission for it: until you "
    'grant it, connections to other nodes may fail with "No route to host"; without --user, a LaunchDaemon is '
    "installed and has neither limit"
)

User = Annotated[bool, typer.Option("--user", help="Use this user's service instead of the machine's. Needs no root.")]
Named = Annotated[
    str, typer.Option("--manager", metavar="systemd|launchd", help="Service manager to use; default: this machine's.")
]
Dry = Annotated[bool, typer.Option("--dry-run", help="Show the file and the commands without changing anything.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    free = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(context_settings=free, short_help="Install the agent as a service and start it.")(install)
    app.command()(uninstall)
    app.command(short_help="Show whether the service is installed and running.")(status)


def install(
    context: typer.Context,
    user: User = False,
    run_as: Annotated[str, typer.Option(help="User to run as; default: you, or the user who called sudo.")] = "",
    nice: Annotated[int | None, typer.Option(min=-20, max=19, help="Nice value of the agent and its trainers.")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Environment variable for the agent; may be repeated."),
    ] = None,
    manager: Named = "",
    dry_run: Dry = False,
    json: Json = False,
) -> None:
    """Install the agent as a service and start it. Takes every option of `run`, such as --name and --listen.

    Exit codes: 0 running (or already was), 1 the service manager or the agent failed, 2 usage error, 6 root required,
    7 no service manager.
    """
    with _errors(json):
        options = run_options.parse(context)  # before the machine is: what is typed wrongly is wrong everywhere
        variables = _variables(env or [])
        machine = _manager(user, manager)
        if user and nice is not None and nice < 0:
            raise InvalidInputError("--nice", f"a user may not set {nice}; install a system service instead")
        service = _service(machine, _owner(machine.scope, run_as), options, nice, variables)
        _install(machine, service, dry_run=dry_run, json=json)


def _install(machine: Manager, service: Service, *, dry_run: bool, json: bool) -> None:
    """Print the file and the commands, then write, enable and start."""
    remarks = [_AS_ROOT] if service.scope == "system" and service.user == "root" else []
    remarks += [_LAUNCH_AGENT] if machine.name == "launchd" and service.scope == "user" else []
    try:
        state = machine.look()
    except (ManagerError, NoManagerError) as error:
        if not dry_run:
            raise
        state = State()  # a dry run may be of another kind of machine
        remarks.append(f"shown as if nothing were installed: {error}")
    data = content(service, machine.name)
    is_current = state.data == data and state.running and state.enabled
    steps = [] if is_current else machine.install_steps(state)
    if steps and machine.name == "launchd" and not service.logs.is_dir():  # it makes the boot log, but not its folder
        steps.insert(0, ("create", str(service.logs)))
    if machine.name == "systemd" and service.scope == "user":
        steps += _linger_steps(service.user)
    if not (dry_run or is_current):
        machine.check_allowed()
    _show(steps, _NO_CHANGE, data.decode(), dry_run=dry_run, json=json)
    if dry_run:
        _finish("", remarks, steps, json=json, dry_run=True, content=data.decode())
        return
    for step in [*steps]:
        try:
            _make_folder(service.logs, service.user) if step[0] == "create" else machine.perform(step, data)
        except ManagerError as error:
            if step[0] != "loginctl":
                raise ManagerError(f"{error}; for the reason, see {_log(machine, service)}") from None
            steps.remove(step)
            remarks.append(f"the service ends at logout unless an administrator runs: {shlex.join(step)}")
    state = state if is_current else machine.settled()
    if not state.running:
        raise ManagerError(f"installed, but not running ({state.detail}); see {_log(machine, service)}")
    fields = _status_fields(machine, state)
    _finish(_status_text(fields), remarks, steps, json=json, **fields)


def _make_folder(path: Path, user: str) -> None:
    """Make a folder, and what of its path is missing, for this user alone."""
    for folder in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        folder.mkdir(mode=0o700)
        if os.geteuid() == 0:
            entry = pwd.getpwnam(user)
            os.chown(folder, entry.pw_uid, entry.pw_gid)


def _linger_steps(user: str) -> list[Command]:
    """Return the command after which a user's services continue without a session; none if they do already."""
    with contextlib.suppress(ManagerError):  # of a user who neither lingers nor is logged in
        if "Linger=yes" in call(("loginctl", "show-user", user, "--property=Linger")).splitlines():
            return []
    return [("loginctl", "enable-linger", user)]


def uninstall(user: User = False, manager: Named = "", dry_run: Dry = False, json: Json = False) -> None:
    """Stop the service and remove it. Trainers keep running for a while, as during an agent restart. Runs and keys
    stay.

    Exit codes: 0 removed (or was not installed), 1 the service manager failed, 6 root required, 7 no service manager.
    """
    with _errors(json):
        machine = _manager(user, manager)
        state = machine.look()
        steps = machine.uninstall_steps(state) if state.data is not None or state.loaded else []
        if steps and not dry_run:
            machine.check_allowed()
        _show(steps, f"no change: there is no {machine.file}", dry_run=dry_run, json=json)
        if dry_run:
            _finish("", [], steps, json=json, dry_run=True, content=None)
            return
        for step in steps:
            machine.perform(step)
        owner = installed_node(state.data or b"")
        folder = str(owner[1].parent.parent) if owner else ""
        remark = f"left in place: runs and logs in {folder}, and keys" if owner else "runs, logs and keys stay in place"
        text = f"removed {machine.file}" if steps else ""
        _finish(text, [remark], steps, json=json, file=str(machine.file), state=folder)


def status(user: User = False, manager: Named = "", json: Json = False) -> None:
    """Show whether the service is installed and running, since when, and where its file and log are.

    Exit codes: 0 running, 3 not running, 4 not installed, 1 the service manager failed, 7 no service manager.
    """
    with _errors(json):
        machine = _manager(user, manager)
        fields = _status_fields(machine, machine.look())
        other = _manager(not user, machine.name)
        is_other = not fields["installed"] and other.file.exists()
        remarks = [f"there is also a {other.scope} service: {other.file}"] if is_other else []
        _finish(_status_text(fields), remarks, None, json=json, **fields)
        if not fields["running"]:
            raise typer.Exit(NOT_RUNNING if fields["installed"] else NOT_INSTALLED)


# ---------------------------------------------------------------- from options to a service


def _manager(user: bool, name: str) -> Manager:
    scope: Scope = "user" if user else "system"
    match name:
        case "":
            return Manager(scope, manager_here())
        case "systemd" | "launchd":
            return Manager(scope, name)
        case _:
            raise InvalidInputError("--manager", f"{name!r} is neither systemd nor launchd")


def _caller() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise InvalidInputError(
            "--run-as", f"user id {os.geteuid()} has no name here; give a user with --run-as"
        ) from None


def _home(user: str) -> Path:
    try:
        return Path(pwd.getpwnam(user).pw_dir)
    except KeyError:
        raise InvalidInputError("--run-as", f"no user {user!r} on this machine") from None


def _owner(scope: Scope, run_as: str) -> str:
    caller = _caller()
    if scope == "user":
        if run_as not in ("", caller):
            raise InvalidInputError("--run-as", f"only {run_as} can install that user's service; run this as {run_as}")
        return caller
    return run_as or (os.environ.get("SUDO_USER", "") if os.geteuid() == 0 else "") or caller


def _service(
    machine: Manager, owner: str, options: run_options.RunOptions, nice: int | None, variables: dict[str, str]
) -> Service:
    """Return the service with its node's name and state folder written out: a host may be renamed, and a service knows
    little of a shell's environment."""
    home, is_own = _home(owner), owner == _caller()
    state = (options.state or (names.state_root() if is_own else home / _STATE[machine.name])).absolute()
    words = ["--name", options.node, "--state", str(state), *options.words]
    if machine.name == "launchd" and STALL_OPTION not in words:  # it has no watchdog
        words += [STALL_OPTION, str(STALL_SECONDS)]
    places = {name: os.environ[name] for name in CARRIED if is_own and os.environ.get(name)}
    return Service(
        node=options.node,
        command=(*own_command(), "run", *words),
        scope=machine.scope,
        user=owner,
        logs=state / options.node / "logs",
        nice=nice,
        environment=tuple(sorted((places | variables).items())),
    )


def _variables(env: list[str]) -> dict[str, str]:
    variables = {}
    for item in env:
        name, equals, value = item.partition("=")
        if not equals:
            raise InvalidInputError("--env", f"{item!r} is not of the form NAME=VALUE")
        env_policy.check_name(name, "--env")
        env_policy.check_value(value, f"--env {name}")
        variables[name] = value
    return variables


# ---------------------------------------------------------------- output


def _show(steps: list[Command], otherwise: str, content: str = "", *, dry_run: bool, json: bool) -> None:
    """Print what will be done, or with a dry run would be."""
    lines = [] if steps else [otherwise]
    for step in steps:
        verb = "" if step[0] in ("create", "write", "remove") else "run "
        lines.append(f"{'would ' if dry_run else ''}{verb}{shlex.join(step)}")
        if step[0] == "write":
            lines += [f"    {line}".rstrip() for line in content.splitlines()]
    if not json:
        print("\n".join(lines), flush=True)


def _status_fields(machine: Manager, state: State) -> dict[str, Any]:
    owner, since = installed_node(state.data or b""), None
    if state.pid is not None:
        with contextlib.suppress(psutil.Error):
            since = psutil.Process(state.pid).create_time()
    return {
        "installed": state.data is not None,
        "enabled": state.data is not None and state.enabled,
        "running": state.running,
        "pid": state.pid,
        "since": since,
        "detail": state.detail,
        "manager": machine.name,
        "scope": machine.scope,
        "service": machine.service,
        "file": str(machine.file),
        "node": owner[0] if owner else None,
        "log": str(owner[1] / "agent.log") if owner else None,
    }


def _status_text(fields: dict[str, Any]) -> str:
    place = f"{fields['manager']}, {fields['scope']}"
    if not fields["installed"]:
        loose = f"; but it is {fields['detail']}" if fields["running"] else ""
        return f"not installed: no {fields['file']} ({place}){loose}"
    running = f"no: {fields['detail'] or 'not running'}"
    if fields["running"]:
        running = f"yes, pid {fields['pid']}"
        if fields["since"] is not None:
            running += f", since {datetime.datetime.fromtimestamp(fields['since']):%Y-%m-%d %H:%M:%S}"
    rows = {
        "service": f"{fields['service']} ({place})",
        "node": fields["node"] or "unknown: another program's file",
        "running": running,
        "enabled": "yes" if fields["enabled"] else "no: it won't start automatically",
        "file": fields["file"],
        "log": fields["log"] or "unknown",
    }
    return "\n".join(f"{name:<9} {value}" for name, value in rows.items())


def _log(machine: Manager, service: Service) -> str:
    if machine.name == "systemd":
        user = "--user " if service.scope == "user" else ""
        return f"{service.logs / 'agent.log'}, or journalctl {user}-u {machine.service}"
    return str(service.logs / BOOT_LOG)


def _finish(text: str, remarks: list[str], steps: list[Command] | None, *, json: bool, **fields: Any) -> None:
    """Print the end; `steps`: those of a command that changes something."""
    if steps is not None:
        fields = {"changed": bool(steps), "steps": [shlex.join(step) for step in steps]} | fields
    if json:
        print(json_text.dumps({"ok": True, **fields, "remarks": remarks}))
    elif lines := [*([text] if text else []), *(f"note: {remark}" for remark in remarks)]:
        print("\n".join(lines))


@contextlib.contextmanager
def _errors(json: bool) -> Iterator[None]:
    """Print a failure as one object on standard output too, with --json."""
    try:
        yield
    except TrainctlError as error:
        if not json:
            raise
        code = next((code for kind, code in _CODES if isinstance(error, kind)), "failed")
        print(json_text.dumps({"ok": False, "error": {"code": code, "text": str(error)}}))
        raise typer.Exit(error.exit_code) from None
