"""The `trainctl` command: the full screen, the subcommands of other files, exit codes, and one line for each failure.

Each subcommand is loaded and built when it is asked for, so a command starts with its own file alone.
"""

import errno
import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from trainctl.protocol.errors import InvalidInputError, SeveralInvalidError, TrainctlError, UnreachableError
from trainctl.protocol.machine import standard_streams
from trainctl.protocol.machine.standard_streams import BROKEN_PIPE, HUNG_UP, STANDARD_OUTPUT
from trainctl.tui.cli import output
from trainctl.tui.cli.options import (
    ClusterFile,
    Config,
    Connect,
    ReadOnly,
    ServerKey,
    share_server_key,
    where,
)
from trainctl.tui.commands import targets

HEADINGS = {
    "watch and steer": {
        "attach": "main",
        "status": "inspect",
        "watch": "watch",
        "events": "watch",
        "logs": "logs",
        "alerts": "inspect",
        "policies": "inspect",
        "diagnose": "inspect",
        "send": "send",
        "profile": "send",
        "promote": "send",
    },
    "runs": {
        "demo": "demo",
        "init": "init",
        "check": "check",
        "run": "run",
        "exec": "exec",
        "ls": "runs",
        "runs": "runs",
        "report": "inspect",
        "diff": "inspect",
        "replay": "inspect",
        "export": "export",
        "mirror": "export",
    },
    "data and models": {"data": "check", "model": "model", "score": "export"},
    "cluster": {"cluster": "cluster", "doctor": "doctor"},
    "tune": {"advise": "advise", "bench": "advise", "simulate": "advise", "calibrate": "doctor"},
    "keys and settings": {"keys": "keys", "config": "init", "schema": "init", "help": "init"},
}
"""The subcommands under each heading of the help, and the file of each."""
FILES = {name: file for names in HEADINGS.values() for name, file in names.items() if file != "main"}
RENAMED = {"discover": "cluster discover", "export-model": "model export", "quantize": "model quantize"}
"""Names of 0.2.0, which still work, by what they are now."""
CHANGING = frozenset(
    {
        "run",
        "exec",
        "send",
        "profile",
        "promote",
        "demo",
        "score",
        "init",
        "keys new",
        "keys authorize",
        "keys revoke",
        "cluster add",
        "cluster remove",
        "cluster sync",
        "calibrate",
        "bench",
        "runs rename",
        "runs remove",
    }
)
"""Subcommands that change a run, the cluster, or who may do what: `--read-only` refuses them."""


WRITING = frozenset({"model", "mirror"})
"""Subcommands that leave files, and change nothing else."""


def has_effect(words: Sequence[str]) -> bool:
    """Return whether a command line, from the command's name on, does more than print."""
    if {"-h", "--help"} & {*words}:
        return False
    writes = words[0] in WRITING or any(word.split("=")[0] == "--output" for word in words)
    return writes or _changing(words) is not None


def _changing(words: Sequence[str]) -> str | None:
    """Return the name of the command if it changes something."""
    names = [word for word in words[:2] if not word.startswith("-")]
    if words[0] == "alerts" and "--test" in words:
        return "alerts --test"
    return next((name for name in (words[0], " ".join(names)) if name in CHANGING), None)


def refuse_changes(words: Sequence[str]) -> None:
    """Check a command line, without the program's own options. Raises InvalidInputError if it would change
    something."""
    if (changing := _changing(words)) is not None:
        raise InvalidInputError(
            "--read-only", f"{changing} isn't read-only: leave out --read-only, or use status, watch or attach"
        )


SUMMARIES = {
    "demo": "Train a small real model with a few agents on this machine.",
    "run": "Start or resume a run.",
    "exec": "Run a command as a run: its log, charts and control.",
    "ls": "List the runs that the agents know, newest first.",
    "check": "Check a run file and report every problem.",
    "alerts": "List the open alerts, urgent ones first.",
    "policies": "Show what each policy sees, would do next, and did.",
    "diagnose": "Say why a run is slow or stuck, and what to do about it.",
    "report": "Report on a run as one page, from its record.",
    "diff": "Say how two runs differ, and at which step.",
    "watch": "Print each step and event as it happens, until Ctrl-C.",
    "events": "Print a run's events: commands, checkpoints, faults.",
    "logs": "Print a trainer's log, or with --all every node's log.",
    "send": "Send a command to a run; see `trainctl send VERB --help`.",
    "profile": "Record how long each operator takes in the next steps.",
    "promote": "Make another node the lead.",
    "replay": "Replay a run in the full screen, from its directory.",
    "export": "Export a run as a table: CSV, JSON lines or Parquet.",
    "score": "Compute log-probabilities or answers for rows of a file.",
    "simulate": "Simulate a run over machines that a file describes.",
    "mirror": "Copy a run to TensorBoard or W&B, live or afterwards.",
    "config": "Print the full screen's effective settings.",
    "init": "Create a starter run.toml and cluster.toml.",
    "doctor": "Check the cluster's machines and suggest fixes.",
    "calibrate": "Measure each node's fastest micro-batch and its parts.",
    "advise": "Advise on nodes for a run: speed, time, cost, settings.",
    "bench": "Compare settings of a run by short real runs here.",
    "schema": "Print a TOML file's JSON Schema, for editors.",
    "help": "Print a documentation page, offline.",
}
"""The line that the help gives each, of at most 64 characters: whole at 80 columns. Others' first sentence fits."""


class LateCommands(Mapping[str, Any]):
    """The commands of `own` and those of FILES, by heading, each completed as it is built."""

    def __init__(self, own: Mapping[str, Any], complete: Callable[[Any], None]) -> None:
        self._built, self._complete = dict(own), complete
        self._names = [name for names in HEADINGS.values() for name in names]
        for command in own.values():
            complete(command)

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            module = importlib.import_module(f"trainctl.tui.cli.{FILES[name]}")
            found = typer.main.get_group(module.app).commands
            for command in found.values():
                self._complete(command)
            self._built |= found
        command = self._built[name]
        command.short_help = SUMMARIES.get(name, command.short_help)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


_ALL = "trainctl.help_all"
"""The key in a context's `meta` of whether help lists every command with its summary."""


class _Group(TyperGroup):
    """Has the subcommands of all files, of which whatever takes --connect takes --server-key."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = cast("MutableMapping[str, Any]", LateCommands(self.commands, self._complete))
        self.has_effect = False
        """True if the command that was called does more than print."""

    def _complete(self, command: Any) -> None:
        share_server_key(next(option for option in self.params if option.name == "server_key"), command)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # which the parser library would call a failure
            raise typer.Exit(BROKEN_PIPE) from None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List the commands by heading; with --all, also what each does, and the options."""
        if not ctx.meta.get(_ALL):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_dl([(heading, " ".join(names)) for heading, names in HEADINGS.items()])
            return
        for heading, names in HEADINGS.items():
            with formatter.section(heading.capitalize()):
                formatter.write_dl([(f"{name:<9}", self.commands[name].get_short_help_str(64)) for name in names])
        super().format_options(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Print nothing after the options."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if ctx.meta.get(_ALL):
            super().format_epilog(ctx, formatter)
            return
        formatter.write_paragraph()
        formatter.write_text("trainctl --help --all explains commands, options and exit codes.")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_ALL] = "--all" in args
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        now = RENAMED.get(args[0])
        if now is not None:
            if not ctx.resilient_parsing:
                output.tell(f"trainctl {args[0]} is now trainctl {now}; the old name goes with the next version")
            args = [*now.split(), *args[1:]]
        if ctx.params.get("read_only") and not ctx.resilient_parsing:
            refuse_changes(args)
        self.has_effect = has_effect(args)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Watch and steer the training of one model. Without a command: full screen.",
    epilog="Exit codes: 0 applied, 1 an unexpected system error, 2 usage error, 3 rejected or failed, 4 expired or not "
    "applied in time, 5 unreachable or a different version, 6 not authorised, 130 interrupted.",
)


# ---------------------------------------------------------------- the full screen


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    connect: Connect = None,
    cluster: ClusterFile = None,
    read_only: ReadOnly = False,
    config: Config = None,
    server_key: ServerKey = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --version: print what a bug report needs, and nothing private.")
    ] = False,
    all_commands: Annotated[
        bool, typer.Option("--all", help="With --help: explain commands, options and exit codes.")
    ] = False,
) -> int:
    if all_commands:
        raise InvalidInputError("--all", "applies only to --help")
    if version:
        output.say(_versions(verbose))
        raise typer.Exit
    if verbose:
        raise InvalidInputError("--verbose", "applies only to --version")
    if ctx.invoked_subcommand is not None:
        return 0
    return _full_screen(where(ctx, connect, cluster), read_only=read_only, config=config)


@app.command()
def attach(
    ctx: typer.Context,
    connect: Connect = None,
    cluster: ClusterFile = None,
    read_only: ReadOnly = False,
    config: Config = None,
) -> int:
    """Open the full screen. The run continues after you close it."""
    return _full_screen(where(ctx, connect, cluster), read_only=read_only, config=config)


def _versions(verbose: bool) -> str:
    if not verbose:
        from importlib.metadata import version  # with email and zipfile: not for other commands

        return f"trainctl {version('trainctl')}"
    from trainctl.tui.setup import installed  # what it reads of the machine takes half a second to load

    return installed.versions()


def _full_screen(at: targets.Where, *, read_only: bool, config: Path | None) -> int:
    if not output.has_screen():
        raise InvalidInputError(
            "terminal",
            "the full screen needs a terminal on standard input, output and error: try trainctl status or watch",
        )
    targets.is_local(at.addresses[0])
    from trainctl.protocol.config.names import user_name
    from trainctl.tui.cli import agent_call

    gc.disable()  # what is loaded now stays: to search it for cycles is a tenth of the loading
    try:
        from trainctl.tui.app.launch import run_app  # Textual: only for the full screen
    finally:
        gc.enable()

    from trainctl.protocol.client.cluster import SeveralRunsError

    several = False
    try:
        address = agent_call.find_agent(at.addresses)
    except UnreachableError:
        address = at.addresses[0]  # the screen waits for it, and says so
    except SeveralRunsError as error:
        address, several = next(iter(error.leads.values())), True
    return run_app(address, by=user_name(), read_only=read_only, config=config, opens_runs=several)


# ---------------------------------------------------------------- the edge


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code. Only exceptions that end the interpreter pass through.

    The exit code is the command's outcome. That of a command that only prints is an error if what it printed is lost.
    """
    arguments = sys.argv[1:] if argv is None else argv
    _prepare(json="--json" in arguments)
    program: Any = typer.main.get_command(app)
    with standard_streams.lossy_streams() as printed:
        code = _outcome(program, arguments)
        sys.stdout.flush()
        if printed.lost is not None and not isinstance(printed.lost, BrokenPipeError):
            output.complain(f"{STANDARD_OUTPUT}: {printed.lost.strerror}")
    if code or printed.lost is None or program.has_effect:
        return code
    return standard_streams.exit_code(printed.lost)


def _outcome(program: Any, arguments: list[str]) -> int:
    json = "--json" in arguments
    try:
        code = program.main(args=arguments, prog_name="trainctl", standalone_mode=False)
    except typer.TyperException as error:
        text = error.format_message().replace("Value error, ", "")  # the validator's word, not the person's
        return _fail("usage", f"{text}{_hint(error)}", error.exit_code, json=json)
    except SeveralInvalidError as error:
        return _fail_each(error, json=json)
    except TrainctlError as error:
        return _fail(output.error_code(error), str(error), error.exit_code, json=json)
    except BrokenPipeError:
        return BROKEN_PIPE
    except OSError as error:
        if error.errno == errno.EIO and error.filename in (
            None,
            STANDARD_OUTPUT,
        ):  # the terminal is gone, so there is nobody to tell
            return HUNG_UP
        where = f"{error.filename}: " if error.filename else ""
        return _fail("system", f"{where}{error.strerror or error}", 1, json=json)
    except (KeyboardInterrupt, typer.Abort):
        return output.INTERRUPTED
    finally:
        targets.forget_keys()
    return code if isinstance(code, int) else 0


def _fail(code: str, text: str, exit_code: int, *, json: bool) -> int:
    if not json:
        output.complain(text)
        return exit_code
    output.emit_error(code, text)
    return exit_code


def _fail_each(error: SeveralInvalidError, *, json: bool) -> int:
    """Print a line for each thing that is wrong, or one object that lists them."""
    if json:
        output.emit_error(output.error_code(error), str(error), problems=[str(one) for one in error.each])
    else:
        for one in error.each:
            output.complain(str(one))
    return error.exit_code


def _hint(error: typer.TyperException) -> str:
    path = getattr(getattr(error, "ctx", None), "command_path", None)
    return f" (see {path} --help)" if path else ""


def _prepare(*, json: bool) -> None:
    """Make streams print `?` for what their encoding lacks, a closed one drop it, and an internal error one line or
    object."""
    standard_streams.open_closed()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if not os.environ.get("TRAINCTL_DEBUG"):
        sys.excepthook = functools.partial(_one_line_fault, json=json)


def _one_line_fault(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, *, json: bool = False
) -> None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" in {trace.tb_frame.f_code.co_qualname}, line {trace.tb_lineno}" if trace is not None else ""
    text = f"internal error: {kind.__name__}: {error}{where} (set TRAINCTL_DEBUG=1 for the traceback)"
    _fail("internal", text, 1, json=json)


if __name__ == "__main__":
    sys.exit(main())
