"""`trainctl-agent install`, `uninstall` and `status`: the agent as a service of this machine."""

import contextlib
import datetime
import json as json_text
import os
import pwd
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from trainctl.node_agent.services.managed_service import (
    BOOT_LOG,
    STALL_SECONDS,
    UNIT,
    Command,
    Manager,
    ManagerError,
    NoManagerError,
    Service,
    State,
    call,
    installed_node,
    manager_here,
    own_command,
    property_list,
    unit,
)
from trainctl.protocol.config import addresses, cluster_file, env_policy, names
from trainctl.protocol.errors import InvalidInputError, NotAuthorisedError, TrainctlError
from trainctl.protocol.files.durable_files import make_folder, write_file

NOT_RUNNING, NOT_INSTALLED = 3, 4
"""Exit codes of `status`, the same as systemctl's."""
CARRIED = ("TRAINCTL_CLUSTER", "TRAINCTL_KEYS", "XDG_CONFIG_HOME")
"""Variables that name places: the service gets those that this shell has."""
STALL_OPTION = "--exit-if-stalled"
_STATE = {"systemd": ".local/state/trainctl", "launchd": "Library/Application Support/trainctl"}
_CODES = ((NoManagerError, "no-service-manager"), (NotAuthorisedError, "not-authorised"), (InvalidInputError, "usage"))
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
    *,
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
        machine = _manager(user, manager)
        if user and nice is not None and nice < 0:
            raise InvalidInputError("--nice", f"a user may not set {nice}; install a system service instead")
        service = _service(machine, context, run_as, nice, env or [])
        data = unit(service).encode() if machine.name == "systemd" else property_list(service)
        remarks = [_AS_ROOT] if not user and service.user == "root" else []
        remarks += [_LAUNCH_AGENT] if user and machine.name == "launchd" else []
        state = State() if dry_run else machine.look()
        is_current = state.data == data and state.running and state.enabled
        commands = [] if is_current else machine.start_commands(state, service.user)
        steps = [] if is_current else [f"write {machine.file}", *map(shlex.join, commands)]
        if steps and not dry_run:
            machine.check_allowed()
        _show(steps, "no change: already installed with these settings and running", data, json=json)
        if dry_run:
            _say("", remarks, json, changed=True, steps=steps, dry_run=True, content=data.decode())
            return
        if steps:
            remarks += _start(machine, service, data, commands)
            state = machine.settled()
        if not state.running:
            raise ManagerError(f"installed, but not running ({state.detail}); see {_log(machine, service)}")
        fields = _status_fields(machine, state)
        _say(_status_text(fields), remarks, json, changed=bool(steps), steps=steps, **fields)


def uninstall(user: User = False, manager: Named = "", dry_run: Dry = False, json: Json = False) -> None:
    """Stop the service and remove it. Trainers keep running for a while, as during an agent restart. Runs and keys
    stay.

    Exit codes: 0 removed (or was not installed), 1 the service manager failed, 6 root required, 7 no service manager.
    """
    with _errors(json):
        machine = _manager(user, manager)
        state = machine.look()
        commands = machine.stop_commands(state)
        steps = [*map(shlex.join, commands)]
        if steps and not dry_run:
            machine.check_allowed()
        _show(steps, f"no change: there is no {machine.file}", json=json)
        if dry_run:
            _say("", [], json, changed=bool(steps), steps=steps, dry_run=True, content=None)
            return
        for command in commands:
            call(command)
        owner = installed_node(state.data or b"")
        folder = str(owner[1].parent.parent) if owner else ""
        remark = f"left in place: runs and logs in {folder}, and keys" if owner else "runs, logs and keys stay in place"
        text = f"removed {machine.file}" if steps else ""
        _say(text, [remark], json, changed=bool(steps), steps=steps, file=str(machine.file), state=folder)


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
        _say(_status_text(fields), remarks, json, **fields)
        if not fields["running"]:
            raise typer.Exit(NOT_RUNNING if fields["installed"] else NOT_INSTALLED)


def _start(machine: Manager, service: Service, data: bytes, commands: list[Command]) -> list[str]:
    """Write the file and run the commands; return remarks. Raises OSError or ManagerError."""
    remarks = []
    if machine.name == "launchd":  # it makes the boot log, but not its folder
        for missing in reversed([path for path in (service.logs, *service.logs.parents) if not path.exists()]):
            missing.mkdir(mode=0o700)
            if os.geteuid() == 0:
                entry = pwd.getpwnam(service.user)
                os.chown(missing, entry.pw_uid, entry.pw_gid)
    make_folder(machine.file.parent)
    write_file(machine.file, data, 0o644)  # both managers want others to read it
    for command in commands:
        try:
            call(command)
        except ManagerError as error:
            if command[0] != "loginctl":
                raise ManagerError(f"{error}; for the reason, see {_log(machine, service)}") from None
            remarks.append(f"the service ends at logout unless an administrator runs: {shlex.join(command)}")
    return remarks


def _log(machine: Manager, service: Service) -> str:
    if machine.name == "launchd":
        return str(service.logs / BOOT_LOG)
    return f"{service.logs / 'agent.log'}, or journalctl {'--user ' if machine.scope == 'user' else ''}-u {UNIT}"


# ---------------------------------------------------------------- from options to a service


def _manager(user: bool, name: str) -> Manager:
    if name not in ("", "systemd", "launchd"):
        raise InvalidInputError("--manager", f"{name!r} is neither systemd nor launchd")
    return Manager("user" if user else "system", name or manager_here())  # type: ignore[arg-type]


def _check(options: dict[str, Any]) -> None:
    node, file = options["name"], options["cluster"]
    if not re.fullmatch(names.NAME_PATTERN, node):
        problem = f"{node!r} is not a node name: use lower-case letters, digits, '.', '_' and '-'"
        raise InvalidInputError("--name", problem)
    if options["parent_watch"]:
        raise InvalidInputError("--leash", "a service has no standard input to watch; leave this option out")
    if options["detach"]:
        raise InvalidInputError("--detach", "a service is in a session of its own; leave this option out")
    for name in ("listen", "live"):
        if options[name] is not None:
            addresses.check_bind(options[name], keys=True)  # the agent looks for them when it starts
    if file is not None:
        cluster = cluster_file.read(file)
        if node not in cluster.nodes:
            raise InvalidInputError("--name", f"no node {node!r} in {file}")
        cluster_file.check_hooks(cluster, file)


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


def _owner(user: bool, run_as: str) -> tuple[str, Path, bool]:
    """Return the user who runs the service, that user's home, and whether it is the caller."""
    try:
        caller = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        problem = f"user id {os.geteuid()} has no name here; give a user with --run-as"
        raise InvalidInputError("--run-as", problem) from None
    if user and run_as not in ("", caller):
        raise InvalidInputError("--run-as", f"only {run_as} can install that user's service; run this as {run_as}")
    owner = run_as or (os.environ.get("SUDO_USER", "") if not user and os.geteuid() == 0 else "") or caller
    try:
        return owner, Path(pwd.getpwnam(owner).pw_dir), owner == caller
    except KeyError:
        raise InvalidInputError("--run-as", f"no user {owner!r} on this machine") from None


def _service(machine: Manager, install: Any, run_as: str, nice: int | None, env: list[str]) -> Service:
    """Return the service with the options of `run` from the context of `install`, checked. Its node's name and state
    folder are written out, and paths are absolute: a host may be renamed, and a service knows little of a shell."""
    command = install.parent.command.commands["run"]
    try:
        context = command.make_context("run", list(install.args), parent=install.parent)
    except typer.TyperException as error:
        raise InvalidInputError("install", f"{error.format_message()} (see run --help)") from None
    owner, home, is_own = _owner(machine.scope == "user", run_as)
    node, default = context.params["name"] or names.node_name(), home / _STATE[machine.name]
    state = Path(context.params["state"] or (names.state_root() if is_own else default)).absolute()
    cluster = context.params["cluster"] and Path(context.params["cluster"]).absolute()
    options = {**context.params, "name": node, "state": state, "cluster": cluster}
    _check(options)
    words = ["--name", node, "--state", str(state)]
    for option in command.params:
        source, value = context.get_parameter_source(option.name), options[option.name]
        is_set = source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")
        if is_set and value is not False and option.name not in ("name", "state"):
            words += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    if machine.name == "launchd" and STALL_OPTION not in words:  # it has no watchdog
        words += [STALL_OPTION, str(STALL_SECONDS)]
    places = {name: os.environ[name] for name in CARRIED if is_own and os.environ.get(name)}
    environment = tuple(sorted((places | _variables(env)).items()))
    command_line = (*own_command(), "run", *words)
    return Service(node, command_line, machine.scope, owner, state / node / "logs", nice, environment)


# ---------------------------------------------------------------- output


def _show(steps: list[str], otherwise: str, data: bytes = b"", *, json: bool) -> None:
    """Print what will be done, before it is: each step, and after that of the file its content."""
    for step in [] if json else steps or [otherwise]:
        is_file = step.startswith("write ")
        print(step if is_file or not steps else f"run {step}", flush=True)
        for line in data.decode().splitlines() if is_file else ():
            print(f"    {line}".rstrip(), flush=True)


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
    """Return the fields that are known as text, a line each."""
    words = {name: ("no", "yes")[value] if isinstance(value, bool) else value for name, value in fields.items()}
    if fields["since"] is not None:
        words["since"] = f"{datetime.datetime.fromtimestamp(fields['since']):%Y-%m-%d %H:%M:%S}"
    return "\n".join(f"{name:<9} {value}" for name, value in words.items() if value not in (None, ""))


def _say(text: str, remarks: list[str], json: bool, **fields: Any) -> None:
    if json:
        print(json_text.dumps({"ok": True, **fields, "remarks": remarks}))
        return
    for line in filter(None, (text, *(f"note: {remark}" for remark in remarks))):
        print(line)


@contextlib.contextmanager
def _errors(json: bool) -> Iterator[None]:
    """Print a failure as one object on standard output too, with --json."""
    try:
        yield
    except (TrainctlError, OSError) as error:
        if not json:
            raise
        code = next((code for kind, code in _CODES if isinstance(error, kind)), "failed")
        print(json_text.dumps({"ok": False, "error": {"code": code, "text": str(error)}}))
        raise typer.Exit(error.exit_code if isinstance(error, TrainctlError) else 1) from None
