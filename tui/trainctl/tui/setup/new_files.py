"""Files that are written only where there is none: all of them or none, whole under their names or not there."""

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainctl.protocol.errors import InvalidInputError


def check_free(files: Sequence[Path]) -> None:
    """Raises InvalidInputError naming the first that exists."""
    for file in files:
        if file.exists() or file.is_symlink():
            raise InvalidInputError(str(file), "already exists and is never overwritten; give a different name")


@contextlib.contextmanager
def drafts(texts: dict[Path, str]) -> Iterator[dict[Path, Path]]:
    """Drafts beside the files, by file, for the caller to check; at a good end they get the files' names.

    Raises InvalidInputError naming a file that came to be there meanwhile or can't be written; none is left then.
    """
    check_free([*texts])
    made: dict[Path, Path] = {}
    try:
        for file, text in texts.items():
            made[file] = _draft(file, text)
        yield made
        _publish(made)
    finally:
        for draft in made.values():
            draft.unlink(missing_ok=True)


def _draft(file: Path, text: str) -> Path:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.stem}-{secrets.token_hex(4)}{file.suffix}")
        with draft.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise InvalidInputError(str(file), f"can't be written: {error.strerror}") from None
    return draft


def _publish(made: dict[Path, Path]) -> None:
    """A link never replaces a file, as a rename would."""
    linked: list[Path] = []
    try:
        for file, draft in made.items():
            file.hardlink_to(draft)
            linked.append(file)
    except OSError as error:
        for done in linked:
            done.unlink(missing_ok=True)
        raise InvalidInputError(str(file), f"can't be written: {error.strerror}") from None
