"""What the command line prints: one JSON object, or lines for a person, both safe to show."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from trainctl.protocol import errors

ERROR_CODES: tuple[tuple[type[errors.TrainctlError], str], ...] = (
    (errors.SeveralInvalidError, "invalid-input"), (errors.InvalidInputError, "invalid-input"),
    (errors.RefusedError, "refused"), (errors.ExpiredError, "expired"), (errors.UnreachableError, "unreachable"),
    (errors.NotAuthorisedError, "not-authorised"), (errors.VersionError, "version"), (errors.ProtocolError, "protocol"),
)  # fmt: skip
"""The `error.code` of each exception, first match."""


def has_screen() -> bool:
    """Whether a person sees all three streams; the full screen is drawn on standard error."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def emit(value: Any) -> None:
    """One JSON value on one line of standard output; NaN and infinities become null."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def emit_ok(**fields: Any) -> None:
    """The one object of a `--json` call that went well."""
    emit({"ok": True, **fields})


def answer(text: str, *, json: bool, none: str = "", **fields: Any) -> int:
    """With `json` one object; for a person the text, or where it is empty the remark `none`. The exit code, 0."""
    if json:
        emit_ok(**fields)
    elif text:
        say(text)
    else:
        tell(none)
    return 0


def emit_error(code: str, text: str, problems: Sequence[str] = (), **fields: Any) -> None:
    """The one object of a `--json` call that didn't; with several `problems`, each of them is in `error.problems`."""
    several = {"problems": [_encodable(one_line(problem)) for problem in problems]} if problems else {}
    emit({"ok": False, "error": {"code": code, "text": _encodable(one_line(text)), **several}, **fields})


def say(text: str) -> None:
    """Lines on standard output, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def tell(text: str) -> None:
    """A remark for the person, on standard error: never part of what a script reads."""
    sys.stderr.write(f"{one_line(text)}\n")
    sys.stderr.flush()


def complain(text: str) -> None:
    """The one line of a failure."""
    tell(f"trainctl: {text}")


def error_code(error: errors.TrainctlError) -> str:
    return next((code for kind, code in ERROR_CODES if isinstance(error, kind)), "failed")


def one_line(text: str) -> str:
    """Text from anywhere as one printable line: what would steer a terminal becomes a space."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def log_text(text: str, *, raw: bool) -> str:
    """A log as it is (`raw`), or without the control characters that would steer a terminal; colours go with them."""
    if raw:
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else "\n" if char == "\r" else "" for char in text)


def arrowed(text: str) -> str:
    """With every arrow as standard output's encoding can show it: all →, or all ->."""
    try:
        "→".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return text.replace("→", "->")
    return text.replace(" -> ", " → ")


def silence() -> None:
    """Point standard output at nothing after its reader has gone, so that the interpreter's last flush is quiet."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _encodable(text: str) -> str:
    """Without the lone surrogates that undecodable argument bytes arrive as."""
    return text.encode("utf-8", "replace").decode()
