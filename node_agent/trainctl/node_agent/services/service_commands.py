"""`trainctl-agent install`, `uninstall` and `status`: the agent as a service of this machine."""

import contextlib
import json as json_text
import math
import os
import pwd
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from trainctl.node_agent.services.managed_service import (
    STALL_SECONDS,
    STOP_SECONDS,
    Command,
    Manager,
    ManagerError,
    ManagerName,
    Service,
    State,
    call,
    logs_named,
    manager_here,
    own_command,
)
from trainctl.protocol.config import addresses, cluster_file, env_policy, names
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.files.durable_files import make_folder, write_file

NOT_RUNNING, NOT_INSTALLED = 3, 4
"""Exit codes of `status`, the same as systemctl's."""
CARRIED = ("TRAINCTL_CLUSTER", "TRAINCTL_KEYS", "XDG_CONFIG_HOME")
"""Variables that name places: the service gets those that this shell has."""
GRACE_MARGIN_SECONDS = 15
"""Seconds more than its grace that an agent which drains its node is given to end."""
_STATE = {"systemd": ".local/state/trainctl", "launchd": "Library/Application Support/trainctl"}
_CODES = {2: "usage", 6: "not-authorised", 7: "no-service-manager"}
_AS_ROOT = "the agent and its trainers run as root; to change the user, add --run-as"
_LAUNCH_AGENT = (
    "a LaunchAgent starts at login and stops at logout, and macOS asks for Local Network permission for it: until you "
    'grant it, connections to other nodes may fail with "No route to host"; without --user, a LaunchDaemon is '
    "installed and has neither limit"
)

User = Annotated[bool, typer.Option("--user", help="Use this user's service instead of the machine's. Needs no root.")]
Named = Annotated[ManagerName | None, typer.Option("--manager", help="Service manager; default: this machine's.")]
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
    manager: Named = None,
    dry_run: Dry = False,
    json: Json = False,
) -> None:
    """Install the agent as a service and start it. Takes every option of `run`, such as --name and --listen.

    Exit codes: 0 running (or already was), 1 the service manager or the agent failed, 2 usage error, 6 root required,
    7 no service manager.
    """
    with _answer(json) as (say, answer):
        machine = _manager(user, manager)
        if user and nice is not None and nice < 0:
            raise InvalidInputError("--nice", f"a user may not set {nice}; install a system service instead")
        service = _service(machine, context, run_as, nice, _variables(env or []))
        data = machine.file_of(service)
        answer["remarks"] += [_AS_ROOT] if not user and service.user == "root" else []
        answer["remarks"] += [_LAUNCH_AGENT] if user and machine.name == "launchd" else []
        state = State() if dry_run else machine.look()
        is_current = state.running and state.enabled and machine.installed() == data
        commands = [] if is_current else machine.start_commands(state, service.user)
        steps = [] if is_current else [f"write {machine.file}", *map(shlex.join, commands)]
        answer |= {"changed": not is_current, "steps": steps}
        if steps and not dry_run:
            machine.check_allowed()
        shown = [f"write {machine.file}", textwrap.indent(data.decode(), "    ").rstrip()]
        shown += [f"run {shlex.join(command)}" for command in commands]
        for line in ["no change: already installed with these settings and running"] if is_current else shown:
            say(line)
        if dry_run:
            answer |= {"dry_run": True, "content": data.decode()}
            return
        if steps:
            answer["remarks"] += _start(machine, service, data, commands)
            state = machine.settled()
            if not state.running:
                raise ManagerError(f"installed, but not running ({state.detail}); see {machine.log_of(service)}")
        answer |= _status(machine, state, say)


def uninstall(user: User = False, manager: Named = None, dry_run: Dry = False, json: Json = False) -> None:
    """Stop the service and remove it. Trainers keep running for a while, as during an agent restart. Runs and keys
    stay.

    Exit codes: 0 removed (or was not installed), 1 the service manager failed, 6 root required, 7 no service manager.
    """
    with _answer(json) as (say, answer):
        machine = _manager(user, manager)
        state, data = machine.look(), machine.installed()
        commands = machine.stop_commands(state, installed=data is not None)
        if commands and not dry_run:
            machine.check_allowed()
        answer |= {"changed": bool(commands), "steps": [*map(shlex.join, commands)]}
        for line in [f"run {step}" for step in answer["steps"]] or [f"no change: there is no {machine.file}"]:
            say(line)
        if dry_run:
            answer |= {"dry_run": True, "content": None}
            return
        for command in commands:
            call(command)
        logs = logs_named(data or b"")
        folder = str(logs.parent.parent) if logs else ""
        answer |= {"file": str(machine.file), "state": folder}
        answer["remarks"].append(f"left in place: runs and logs{f' in {folder}' if folder else ''}, and keys")


def status(user: User = False, manager: Named = None, json: Json = False) -> None:
    """Show whether the service is installed and running, since when, and where its file and log are.

    Exit codes: 0 running, 3 not running, 4 not installed, 1 the service manager failed, 7 no service manager.
    """
    with _answer(json) as (say, answer):
        machine = _manager(user, manager)
        answer |= _status(machine, machine.look(), say)
        other = _manager(not user, machine.name)
        if not answer["installed"] and other.file.exists():
            answer["remarks"].append(f"there is also a {other.scope} service: {other.file}")
    if not answer["running"]:
        raise typer.Exit(NOT_RUNNING if answer["installed"] else NOT_INSTALLED)


def _start(machine: Manager, service: Service, data: bytes, commands: list[Command]) -> list[str]:
    """Write the file and run the commands; return remarks. Raises OSError or ManagerError."""
    remarks = []
    if machine.name == "launchd":  # it makes the boot log, but not its folder
        owner = pwd.getpwnam(service.user)
        for missing in reversed([path for path in (service.logs, *service.logs.parents) if not path.exists()]):
            missing.mkdir(mode=0o700)
            os.chown(missing, owner.pw_uid, owner.pw_gid)
    make_folder(machine.file.parent)
    write_file(machine.file, data, 0o644)  # both managers want others to read it
    for command in commands:
        try:
            call(command)
        except ManagerError as error:
            if command[0] != "loginctl":
                raise ManagerError(f"{error}; for the reason, see {machine.log_of(service)}") from None
            remarks.append(f"the service ends at logout unless an administrator runs: {shlex.join(command)}")
    return remarks


# ---------------------------------------------------------------- from options to a service


def _manager(user: bool, name: ManagerName | None) -> Manager:
    return Manager("user" if user else "system", name or manager_here())


def _variables(env: list[str]) -> dict[str, str]:
    for item in env:
        name, equals, value = item.partition("=")
        if not equals:
            raise InvalidInputError("--env", f"{item!r} is not of the form NAME=VALUE")
        env_policy.check_name(name, "--env")
        env_policy.check_value(value, f"--env {name}")
    return dict(item.split("=", 1) for item in env)


def _service(machine: Manager, install: Any, run_as: str, nice: int | None, env: dict[str, str]) -> Service:
    """Return the service with the options of `run` from the context of `install`, checked. Its node's name and state
    folder are written out, and paths are absolute: a host may be renamed, and a service knows little of a shell."""
    command = install.parent.command.commands["run"]
    try:
        context = command.make_context("run", list(install.args), parent=install.parent)
    except typer.TyperException as error:
        raise InvalidInputError("install", f"{error.format_message()} (see run --help)") from None
    user, home, is_own = _owner(machine.scope, run_as)
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
    if machine.name == "launchd" and "--exit-if-stalled" not in words:  # it has no watchdog
        words += ["--exit-if-stalled", str(STALL_SECONDS)]
    places = {name: os.environ[name] for name in CARRIED if is_own and os.environ.get(name)}
    return Service(
        command=(*own_command(), "run", *words),
        scope=machine.scope,
        user=user,
        logs=state / node / "logs",
        nice=nice,
        environment=tuple(sorted((places | env).items())),
        stop_seconds=max(STOP_SECONDS, math.ceil(options["grace"]) + GRACE_MARGIN_SECONDS),
    )


def _owner(scope: str, run_as: str) -> tuple[str, Path, bool]:
    """Return the user who runs the service, that user's home, and whether it is the caller."""
    try:
        caller = pwd.getpwuid(os.geteuid()).pw_name
        if scope == "user" and run_as not in ("", caller):
            problem = f"only {run_as} can install that user's service; run this as {run_as}"
            raise InvalidInputError("--run-as", problem)
        sudoer = os.environ.get("SUDO_USER") if scope == "system" and os.geteuid() == 0 else None
        owner = pwd.getpwnam(run_as or sudoer or caller)
    except KeyError as error:
        raise InvalidInputError("--run-as", f"no such user on this machine: {error.args[0]}") from None
    return owner.pw_name, Path(owner.pw_dir), owner.pw_name == caller


def _check(options: dict[str, Any]) -> None:
    node, file = options["name"], options["cluster"]
    if not re.fullmatch(names.NAME_PATTERN, node):
        problem = f"{node!r} is not a node name: use lower-case letters, digits, '.', '_' and '-'"
        raise InvalidInputError("--name", problem)
    for option, name in (("--leash", "parent_watch"), ("--detach", "detach")):
        if options[name]:
            raise InvalidInputError(option, "a service has no standard input or terminal; leave this option out")
    for address in filter(None, (options["listen"], options["live"])):
        addresses.check_bind(address, keys=True)  # the agent looks for them when it starts
    if file is not None:
        cluster = cluster_file.read(file)
        if node not in cluster.nodes:
            raise InvalidInputError("--name", f"no node {node!r} in {file}")
        cluster_file.check_hooks(cluster, file)


# ---------------------------------------------------------------- output


def _status(machine: Manager, state: State, say: Callable[[str], None]) -> dict[str, Any]:
    """Return what is known of the service, and print it, a line each."""
    data = machine.installed()
    logs, since = logs_named(data or b""), None
    if state.pid is not None:
        with contextlib.suppress(psutil.Error):
            since = psutil.Process(state.pid).create_time()
    fields = {
        "installed": data is not None,
        **asdict(state),
        "since": since,
        "manager": machine.name,
        "scope": machine.scope,
        "service": machine.service,
        "file": str(machine.file),
        "node": logs.parent.name if logs else None,
        "log": str(logs / "agent.log") if logs else None,
    }
    shown = fields if since is None else fields | {"since": f"{datetime.fromtimestamp(since):%Y-%m-%d %H:%M:%S}"}
    for name, value in shown.items():
        if value not in (None, ""):
            say(f"{name:<9} {('no', 'yes')[value] if isinstance(value, bool) else value}")
    return fields


@contextlib.contextmanager
def _answer(json: bool) -> Iterator[tuple[Callable[[str], None], dict[str, Any]]]:
    """Yield what prints a line for people, and the fields of the object that --json prints at the end instead. A
    failure is such an object too."""
    fields: dict[str, Any] = {"ok": True, "remarks": []}
    try:
        yield (lambda _line: None) if json else partial(print, flush=True), fields
    except (TrainctlError, OSError) as error:
        if not json:
            raise
        code = error.exit_code if isinstance(error, TrainctlError) else 1
        print(json_text.dumps({"ok": False, "error": {"code": _CODES.get(code, "failed"), "text": str(error)}}))
        raise typer.Exit(code) from None
    for line in [json_text.dumps(fields)] if json else [f"note: {remark}" for remark in fields["remarks"]]:
        print(line)
