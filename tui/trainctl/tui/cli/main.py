"""The `trainctl` command: full screen, demo, all other subcommands, exit codes, and one line for what goes wrong."""

import errno
import functools
import gc
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, cast

import typer
from typer.core import TyperGroup

from trainctl.protocol.errors import InvalidInputError, SeveralInvalidError, TrainctlError, UnreachableError
from trainctl.protocol.machine import standard_streams
from trainctl.protocol.machine.standard_streams import BROKEN_PIPE, HUNG_UP, STANDARD_OUTPUT
from trainctl.tui.cli import agent_call, output
from trainctl.tui.cli.command_result import INTERRUPTED
from trainctl.tui.cli.lazy_commands import LateCommands, has_effect, refuse_changes
from trainctl.tui.cli.options import (
    ClusterFile,
    Config,
    Connect,
    ReadOnly,
    ServerKey,
    config_of,
    share_server_key,
    where,
)
from trainctl.tui.commands import targets

MOST_DEMO_NODES = 8
"""That train on one machine."""


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

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if ctx.params.get("read_only") and not ctx.resilient_parsing:
            refuse_changes(args)
        self.has_effect = has_effect(args)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Watch and steer the training of one model. Without a command, it opens the full screen.",
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
) -> int:
    if version:
        from trainctl.tui.setup import version_report

        output.say(version_report.full() if verbose else version_report.short())
        raise typer.Exit
    if verbose:
        raise InvalidInputError("--verbose", "applies only to --version")
    if ctx.invoked_subcommand is not None:
        return 0
    return _full_screen(where(ctx, connect, cluster), read_only=read_only, config=config)


@app.command()
def attach(
    ctx: typer.Context, connect: Connect = None, cluster: ClusterFile = None, read_only: ReadOnly = False,
    config: Config = None,
) -> int:  # fmt: skip
    """Open the full screen. The run continues after you close it."""
    only = read_only or bool(ctx.find_root().params.get("read_only"))
    return _full_screen(where(ctx, connect, cluster), read_only=only, config=config_of(ctx, config))


def _full_screen(at: targets.Where, *, read_only: bool, config: Path | None) -> int:
    if not output.has_screen():
        raise InvalidInputError(
            "terminal", "the full screen needs a terminal on standard input, output and error: "
            "try trainctl status or watch",
        )  # fmt: skip
    targets.is_local(at.addresses[0])
    from trainctl.protocol.config.names import user_name

    gc.disable()  # what is loaded now stays: to search it for cycles is a tenth of the loading
    try:
        from trainctl.tui.app.launch import run_app  # Textual: only for the full screen
    finally:
        gc.enable()

    from trainctl.protocol.client.cluster import SeveralRunsError

    several = False
    try:
        address = agent_call.find_lead(at.addresses)
    except UnreachableError:
        address = at.addresses[0]  # the screen waits for it, and says so
    except SeveralRunsError as error:
        address, several = next(iter(error.leads.values())), True
    return run_app(address, by=user_name(), read_only=read_only, config=config, opens_runs=several)


@app.command()
def demo(
    steps: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Steps to train [150 headless, else 2000].")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=16,
            help=f"Agents to start, with one rank each, at most {MOST_DEMO_NODES} that train [3 with torch and MLX "
            "installed, else 2; 8 with --simulated].",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        Literal["auto", "torch", "mlx"],
        typer.Option(help="Library to train with; auto uses both if both are installed."),
    ] = "auto",
    objective: Annotated[
        Literal["pretrain", "sft", "dpo", "qlora"],
        typer.Option(
            help="Train on text (pretrain), on prompts with completions (sft), the same with adapters on a 4-bit model "
            "(qlora), or on preferences between answers (dpo)."
        ),
    ] = "pretrain",
    headless: Annotated[
        bool,
        typer.Option(
            "--headless", help="Run without the screen; print one JSON object at the end. Implied without a terminal."
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Like --headless; errors are printed as one JSON object too.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the model, the text and the runs [in the user's cache folder].", show_default=False
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep this demo's run when the next demo starts.")] = False,
    files: Annotated[
        bool, typer.Option("--files", help="Make the model and the text in --folder, and train nothing.")
    ] = False,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Simulate a cluster instead, with faults; nothing is trained.")
    ] = False,
) -> int:
    """Train a small real model on real text. Starts a few agents, a run and the full screen on this machine."""
    without_screen = headless or json or not output.has_screen()
    if not simulated and nodes is not None and nodes > MOST_DEMO_NODES:
        raise InvalidInputError(
            "--nodes", f"must be at most {MOST_DEMO_NODES}, or add --simulated, which trains nothing"
        )
    from trainctl.tui.cli import demo as program

    if files:
        return program.make_files(folder, objective)
    count = steps or (program.HEADLESS_STEPS if without_screen else program.SCREEN_STEPS)
    wanted = program.DemoOptions(count, nodes, backend, folder, keep, objective, simulated)
    return program.headless(wanted) if without_screen else program.on_screen(wanted)


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
        return INTERRUPTED
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
    """A line for each thing that is wrong; one object that lists them."""
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
