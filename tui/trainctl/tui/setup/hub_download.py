"""A model that isn't in the Hugging Face cache: a person at a terminal is asked whether `hf download` may fetch it."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from trainctl.protocol.errors import InvalidInputError, NotCachedError, RefusedError, installing


def offer(missing: NotCachedError, *, may_ask: bool, tell: Callable[[str], None]) -> None:
    """Download the model if a person at the terminal agrees. Raises `missing` if nobody is there or they decline, and
    RefusedError if the download fails."""
    if not (may_ask and sys.stdin.isatty() and sys.stderr.isatty()):
        raise missing
    program = _program()
    try:
        if not typer.confirm(f"Download {missing.model} with hf download?", default=False, err=True):
            raise missing
        _download(program, missing.model)
    except (KeyboardInterrupt, typer.Abort):
        tell(f"trainctl: interrupted; to download the rest, run: hf download {missing.model}")
        raise


def _program() -> str:
    """hf on PATH, or beside this Python: a virtual environment need not be active."""
    own = Path(sys.executable).with_name("hf")
    found = shutil.which("hf") or (str(own) if own.is_file() else None)
    if found is None:
        raise InvalidInputError("hf", f"the Hugging Face command isn't on PATH; {installing('torch', 'mlx')}")
    return found


def _download(program: str, model: str) -> None:
    """Its output is a note for the person: on standard error."""
    status = subprocess.run([program, "download", model], stdout=sys.stderr, check=False).returncode
    if status:
        raise RefusedError(f"hf download {model} failed (exit status {status}); the lines above have the reason")
