"""Retention: which checkpoints stay once a new one has been written and read back."""

import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.checkpoints import first_of_each, listed, outdated, read_manifest, step_in_copy
from trainctl.trainer.checkpoints.files import tidy

_NUMBER = re.compile(r"step-(\d+)")


def spare(steps: Sequence[int], keep_last: int, keep_every: int, kept: Collection[int]) -> list[int]:
    """The steps, of those given, that go: all but the `keep_last` highest, the first at or after each multiple of
    `keep_every` (0: none), and `kept`."""
    stay = {*sorted(steps, reverse=True)[:keep_last], *first_of_each(steps, keep_every), *kept}
    return [step for step in steps if step not in stay]


def prune(checkpoints: Path, keep_last: int, kept: Collection[Path], keep_every: int = 0) -> None:
    """Remove what `spare` names, and what is superseded of steps up to the newest one; each loses its name before its
    files. One that is being copied elsewhere stays until the next time. Raises OSError about the first that couldn't be
    removed, once all others are gone."""
    tidy(checkpoints)
    copied = step_in_copy(checkpoints)
    by_step = {step_of(folder): folder for folder in listed(checkpoints)}
    stay = [step_of(path) for path in kept] + ([copied] if copied is not None else [])
    gone = [by_step[step] for step in spare([*by_step], keep_last, keep_every, stay)]
    problems = list[OSError]()
    for folder in [*gone, *(path for path in outdated(checkpoints) if path not in kept)]:
        try:
            _remove(folder)
        except OSError as error:
            problems.append(error)
    if problems:
        raise problems[0]


def kept_steps(checkpoints: Path) -> tuple[int, ...]:
    """Steps of the folders that have a manifest, ascending."""
    found = []
    for folder in listed(checkpoints):
        try:
            found.append(read_manifest(folder).step)
        except InvalidInputError:
            continue
    return tuple(sorted(found))


def step_of(folder: Path) -> int:
    """`step-7`, or one that was set aside under that name: 7."""
    match = _NUMBER.search(folder.name)
    assert match is not None, folder
    return int(match[1])


def _remove(folder: Path) -> None:
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone)
