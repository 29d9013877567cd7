"""Everything a person or a script types at: the command line and the full-screen program."""

import importlib
import sys


def main() -> int:
    """Run `trainctl`."""
    return _run("trainctl", "trainctl.tui.cli.main")


def agent() -> int:
    """Run `trainctl-agent`."""
    return _run("trainctl-agent", "trainctl.node_agent.__main__")


def _run(program: str, module: str) -> int:
    """Run a module's `main`; print the line that installs what it lacks."""
    try:
        code: int = importlib.import_module(module).main()
    except ModuleNotFoundError as error:
        name = error.name or module
        if name.startswith("trainctl"):
            remedy = "its files were removed; in a trainctl checkout, run: pip install --force-reinstall '.[tui]'"
        else:
            remedy = "in a trainctl checkout, run: pip install '.[tui]'"
        print(f"{program}: {name} is not installed; {remedy}", file=sys.stderr)
        return 1
    return code
