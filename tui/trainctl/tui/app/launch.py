"""The full-screen program from the command line: from its first start and the person's settings to its last word."""

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainctl.protocol.config.names import state_root
from trainctl.tui.app import config as settings
from trainctl.tui.app import keymap
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.state.source import ClusterSource
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.formatting import count
from trainctl.tui.text.styled_line import clean
from trainctl.tui.widgets.theme import THEMES

HANGUP_SECONDS = 2.0
COLLECTOR_THRESHOLDS = 10_000, 10, 10


def configuration(path: Path | None = None) -> settings.Found:
    """Return the person's settings, their keys checked against the actions that there are. Raises as
    `settings.read`."""
    return settings.read(path, tuple(theme.name for theme in THEMES), keymap.checked)


def as_file(found: settings.Found) -> str:
    """Return all settings as they count, as a config.toml; an action that several screens have is there once."""
    own = found.settings
    made = [
        f"# {found.path}{'' if found.exists else ' (no such file)'}",
        _setting("theme", own.theme, f"auto, {', '.join(theme.name for theme in THEMES)}"),
        _setting("ascii", own.ascii, "auto, true, false"),
        _setting("bell", own.bell, "true: alerts ring the bell"),
        _setting("mouse", own.mouse, "false leaves the mouse to the terminal"),
        _setting("read_only", own.read_only, "true: no commands are sent"),
        _setting("columns", list(own.columns), "per-rank metrics shown as columns in a wide fleet table"),
        "",
        "[keys]",
    ]
    where, named = "", set()
    for row in keymap.rows(own.keys):
        if row.name not in named:
            made += [f"# {row.where}"] if row.where != where else []
            made.append(_setting(row.name, row.keys.replace(" ", ","), row.words))
            where = row.where
            named.add(row.name)
    return "\n".join(made)


def _setting(name: str, value: str | bool | list[str], words: str) -> str:
    return f"{f'{name} = {json.dumps(value)}':<28}  # {words}"


def farewell(state: ViewState, address: str) -> str:
    """Return what is said when the program is left: that the run continues, and how to come back."""
    again = f"reattach with: trainctl attach --connect {address}"
    if not state.active or state.run is None:
        return f"detached; {again}"
    run = state.run
    return f"detached: {run.name} ({run.state}) continues at step {run.step:,} of {count(run.steps)}; {again}"


def _leave_after_hangup(hung_up: threading.Event) -> None:
    """End the program a while after its terminal hung up: one that died can block for ever what is written to it."""
    hung_up.wait()
    time.sleep(HANGUP_SECONDS)
    os._exit(128 + signal.SIGHUP)


def run_app(
    address: str,
    *,
    by: str,
    read_only: bool = False,
    config: Path | None = None,
    opens_runs: bool = False,
    say: Callable[[ViewState, str], str] = farewell,
) -> int:
    """Run the full-screen program until it is left; return the exit status. Raises InvalidInputError for a bad
    address, and for a configuration file that was named and can't be read.

    With `opens_runs`, the first screen is the list of runs. `say` makes the line that is printed at the end from what
    was last known and the address.
    """
    source = ClusterSource(address, by=by)
    found = configuration(config)
    app = TrainctlApp(
        lambda: source,
        read_only=read_only or found.settings.read_only,
        address=address,
        opens_runs=opens_runs,
        first_keys=lambda: keymap.first_keys(found.settings.keys) if claim_first_start() else (),
        **options(found),
    )
    return run(app, found, lambda: say(app.live, source.address))


def options(found: settings.Found) -> dict[str, Any]:
    """Return what the program takes of a person's settings."""
    own = found.settings
    theme, in_ascii = (None if value == "auto" else value for value in (own.theme, own.ascii))
    return {"theme": theme, "in_ascii": in_ascii, "bell": own.bell, "config": found}


def run(app: TrainctlApp, found: settings.Found, say: Callable[[], str]) -> int:
    """Run the program until it is left; return the exit status. `say` makes the line that is printed then."""
    for name in ("COLUMNS", "LINES"):  # exported by a shell, they would stand for the terminal's size for ever
        os.environ.pop(name, None)
    gc.freeze()  # what is loaded by now stays, and a repaint makes thousands of values that go with the next
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    threading.Thread(target=_leave_after_hangup, args=(app.hung_up,), name="hang-up", daemon=True).start()
    app.run(mouse=found.settings.mouse)
    if app.return_code == 0:
        print(clean(say()))
    return app.return_code or 0


MARK = ".first-start"
"""The name of that file; nodes' names begin with no dot."""


def claim_first_start() -> bool:
    """Return True once: the first call makes the file; False if it can't be made, so that nothing is shown again and
    again."""
    file = state_root() / MARK
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(exist_ok=False)
    except OSError:
        return False
    return True
