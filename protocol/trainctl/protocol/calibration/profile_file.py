"""Profiles as TOML files in a folder, one for each calibration."""

import contextlib
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import tomli_w

from trainctl.protocol.calibration.profile import DeviceProfile, ProfileKey
from trainctl.protocol.config import toml_file
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.files.durable_files import make_folder, write_file

SCHEMA: Final = 1
"""Number of the files' layout; a file with a higher one is of a newer trainctl."""
KEPT = 8
"""Profiles of one key that are kept, the newest."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    profile: DeviceProfile


def write(folder: Path, profile: DeviceProfile) -> Path:
    """Store a profile, and delete the oldest ones of its key; the file. Raises OSError."""
    at = datetime.fromtimestamp(profile.created_at, UTC)
    path = folder / f"{_name(profile.key)}-{at:%Y%m%d-%H%M%S}-{at.microsecond // 1000:03}.toml"
    content = {"schema": SCHEMA, "profile": _without_none(msgspec.to_builtins(profile))}
    make_folder(path.parent)
    write_file(path, tomli_w.dumps(content).encode())
    for old in _of_key(folder, profile.key)[:-KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()
    return path


def read(path: Path) -> DeviceProfile:
    """Raises InvalidInputError naming the file and what is wrong with it."""
    raw = toml_file.read(path, "profile")
    number = raw.get("schema")
    if not isinstance(number, int) or number < 1:
        raise InvalidInputError(str(path), "has no schema number; delete it and calibrate again")
    if number > SCHEMA:
        problem = f"has schema {number}, and this trainctl reads up to {SCHEMA}: install the trainctl that wrote it"
        raise InvalidInputError(str(path), problem)
    return toml_file.checked(raw, _File, str(path)).profile


def stored(folder: Path, key: ProfileKey) -> list[DeviceProfile]:
    """The readable profiles of a key, oldest first."""
    return _readable(_of_key(folder, key))


def all_stored(folder: Path) -> list[DeviceProfile]:
    """All readable profiles in a folder, oldest first."""
    return sorted(_readable(sorted(folder.glob("*.toml"))), key=lambda profile: profile.created_at)


def _of_key(folder: Path, key: ProfileKey) -> list[Path]:
    return sorted(folder.glob(f"{_name(key)}-*.toml"))


def _name(key: ProfileKey) -> str:
    """The start of a file's name: the same for the same key."""
    return hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]


def _readable(paths: list[Path]) -> list[DeviceProfile]:
    """A damaged file costs its own profile only."""
    found = []
    for path in paths:
        with contextlib.suppress(InvalidInputError):
            found.append(read(path))
    return found


def _without_none(value: Any) -> Any:
    """TOML has no null."""
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value
