"""`trainctl config`: the person's settings as they count, and the lines of the file that don't."""

import msgspec
import typer

from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.cli import output
from trainctl.tui.cli.options import Config, Json, config_of, subcommands

app = subcommands()


@app.command()
def config(ctx: typer.Context, config: Config = None, json: Json = False) -> int:
    """Print the full screen's effective settings in config.toml format, and report errors in the file."""
    from trainctl.tui.app import keymap, launch  # Textual: not for `--help`

    found = launch.configuration(config_of(ctx, config))
    code = InvalidInputError.exit_code if found.problems else 0
    if json:
        problems = [{"line": problem.line, "text": problem.text} for problem in found.problems]
        keys = {row.name: row.keys.replace(" ", ",") for row in keymap.rows(found.settings.keys)}
        own = msgspec.to_builtins(found.settings) | {"keys": keys}
        output.emit({"ok": not code, "path": str(found.path), "exists": found.exists, "problems": problems, **own})
        return code
    output.say(launch.as_file(found))
    for problem in found.problems:
        output.complain(str(problem))
    return code
