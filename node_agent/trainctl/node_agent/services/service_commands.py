"""`trainctl-agent install`, `uninstall` and `status`: the agent as a service of this machine."""

import contextlib
import json as json_text
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from trainctl.node_agent.services import arguments, launchd, output
from trainctl.node_agent.services.manager import Found, Machine, ManagerError, NoManagerError, carry_out, own_command
from trainctl.node_agent.services.model import Call, Manager, Scope, Service, State, Step
from trainctl.protocol.config import env_policy
from trainctl.protocol.errors import InvalidInputError, NotAuthorisedError, TrainctlError

NOT_RUNNING, NOT_INSTALLED = 3, 4
"""Exit codes of `status`, the same as systemctl's."""
CARRIED = ("TRAINCTL_CLUSTER", "TRAINCTL_KEYS", "XDG_CONFIG_HOME")
"""Variables that name places: the service gets those that this shell has."""
_CODES = ((NoManagerError, "no-service-manager"), (NotAuthorisedError, "not-authorised"), (InvalidInputError, "usage"))

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
    with _told(json):
        arguments.judged(context)  # before the machine is: what is typed wrongly is wrong everywhere
        _variables(env or [])
        machine = _machine(user, manager)
        owner = _owner(machine.scope, run_as)
        if user and nice is not None and nice < 0:
            raise InvalidInputError("--nice", f"a user may not set {nice}; install a system service instead")
        service = _service(context, machine, owner, nice, env or [])
        _install(machine, service, dry_run=dry_run, json=json)


def _install(machine: Machine, service: Service, *, dry_run: bool, json: bool) -> None:
    said = output.remarks(service, machine, launchd.LACKS)
    found = _guess(machine, said) if dry_run else machine.look()
    steps = machine.install_steps(service, found)
    if dry_run:
        text = output.plan_text(steps) or "no change: already installed with these settings and running"
        _say(text, said, json=json, changed=bool(steps), dry_run=True, **output.plan_fields(steps))
        return
    failed = _begin(machine, service, steps)
    said += [step.else_say for step in failed if isinstance(step, Call)]
    done = [output.step_line(step) for step in steps if step not in failed]
    found = machine.settled() if steps else machine.look()
    fields = output.status_fields(machine, found)
    if not fields["running"]:
        raise ManagerError(f"installed, but not running ({found.state.detail}); see {_where_it_says(machine, service)}")
    head = "installed" if done else "no change: already installed with these settings and running"
    _say(f"{head}\n{output.status_text(fields)}", said, json=json, changed=bool(done), steps=done, **fields)


def _guess(machine: Machine, said: list[str]) -> Found:
    """What there is, as far as can be seen: a dry run may be of another kind of machine."""
    try:
        return machine.look()
    except (ManagerError, NoManagerError) as error:
        said.append(f"shown as if nothing were installed: {error}")
        return Found(machine.file, None, State(), None)


def _begin(machine: Machine, service: Service, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    if not steps:
        return ()
    machine.check_allowed()
    try:
        return carry_out(steps)
    except ManagerError as error:
        raise ManagerError(f"{error}; for the reason, see {_where_it_says(machine, service)}") from None


def uninstall(user: User = False, manager: Named = "", dry_run: Dry = False, json: Json = False) -> None:
    """Stop the service and remove it. Trainers keep running for a while, as during an agent restart. Runs and keys
    stay.

    Exit codes: 0 removed (or was not installed), 1 the service manager failed, 6 root required, 7 no service manager.
    """
    with _told(json):
        machine = _machine(user, manager)
        found = machine.look()
        steps, own = machine.uninstall_steps(found), found.own(machine.manager)
        state = own.logs.parent.parent if own else None
        if dry_run:
            text = output.plan_text(steps) or f"no change: there is no {found.file}"
            _say(text, [], json=json, changed=bool(steps), dry_run=True, **output.plan_fields(steps))
            return
        if steps:
            machine.check_allowed()
            carry_out(steps)
        text = f"removed {found.file}" if steps else f"no change: there is no {found.file}"
        said = [f"left in place: runs and logs in {state}, and keys" if state else "runs, logs and keys stay in place"]
        done = [output.step_line(step) for step in steps]
        _say(text, said, json=json, changed=bool(steps), steps=done, file=str(found.file), state=str(state or ""))


def status(user: User = False, manager: Named = "", json: Json = False) -> None:
    """Show whether the service is installed and running, since when, and where its file and log are.

    Exit codes: 0 running, 3 not running, 4 not installed, 1 the service manager failed, 7 no service manager.
    """
    with _told(json):
        machine = _machine(user, manager)
        fields = output.status_fields(machine, machine.look())
        other = Machine("system" if user else "user", machine.manager)
        said = []
        if not fields["installed"] and other.file.exists():
            said.append(f"there is also a {'system' if user else 'user'} service: {other.file}")
        _say(output.status_text(fields), said, json=json, **fields)
        if not fields["running"]:
            raise typer.Exit(NOT_RUNNING if fields["installed"] else NOT_INSTALLED)


# ---------------------------------------------------------------- from what was typed to a service


def _machine(user: bool, manager: str) -> Machine:
    scope: Scope = "user" if user else "system"
    known: dict[str, Manager | None] = {"": None, "systemd": "systemd", "launchd": "launchd"}
    if manager not in known:
        raise InvalidInputError("--manager", f"{manager!r} is neither systemd nor launchd")
    return Machine(scope, known[manager])


def _caller() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise InvalidInputError(
            "--run-as", f"user id {os.geteuid()} has no name here; give a user with --run-as"
        ) from None


def _home_of(user: str) -> Path:
    """Raises InvalidInputError for a user that this machine hasn't."""
    try:
        return Path(pwd.getpwnam(user).pw_dir)
    except KeyError:
        raise InvalidInputError("--run-as", f"no user {user!r} on this machine") from None


def _owner(scope: Scope, run_as: str) -> str:
    here = _caller()
    if scope == "user":
        if run_as not in ("", here):
            raise InvalidInputError("--run-as", f"only {run_as} can install that user's service; run this as {run_as}")
        return here
    chosen = run_as or (os.environ.get("SUDO_USER", "") if os.geteuid() == 0 else "") or here
    _home_of(chosen)
    return chosen


def _service(context: typer.Context, machine: Machine, owner: str, nice: int | None, env: list[str]) -> Service:
    own = owner == _caller()
    given = arguments.of_run(context, machine.manager, None if own else _home_of(owner))
    variables = {name: os.environ[name] for name in CARRIED if own and os.environ.get(name)} | _variables(env)
    return Service(
        node=given.node, command=(*own_command(), "run", *given.words), scope=machine.scope, user=owner,
        logs=given.state / given.node / "logs", nice=nice, environment=tuple(sorted(variables.items())),
    )  # fmt: skip


def _variables(env: list[str]) -> dict[str, str]:
    made = {}
    for item in env:
        name, equals, value = item.partition("=")
        if not equals:
            raise InvalidInputError("--env", f"{item!r} is not of the form NAME=VALUE")
        env_policy.check_name(name, "--env")
        env_policy.check_value(value, f"--env {name}")
        made[name] = value
    return made


# ---------------------------------------------------------------- output


def _where_it_says(machine: Machine, service: Service) -> Path | str:
    if machine.manager == "systemd":
        return f"{service.logs / output.AGENT_LOG}, or journalctl -u {machine.service}"
    return service.logs / launchd.BOOT_LOG


def _say(text: str, said: list[str], *, json: bool, **fields: Any) -> None:
    if json:
        print(json_text.dumps({"ok": True, **fields, "remarks": said}))
        return
    print(text)
    for remark in said:
        print(f"note: {remark}")


@contextlib.contextmanager
def _told(json: bool) -> Iterator[None]:
    """Runs a command: with --json a failure is one object on standard output too."""
    try:
        yield
    except TrainctlError as error:
        if not json:
            raise
        code = next((code for kind, code in _CODES if isinstance(error, kind)), "failed")
        print(json_text.dumps({"ok": False, "error": {"code": code, "text": str(error)}}))
        raise typer.Exit(error.exit_code) from None
