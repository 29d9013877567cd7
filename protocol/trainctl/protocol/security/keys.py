"""The keys of one machine: its agent's pair, its user's pair, and whose keys may do what here.

Keys are CURVE keys in Z85, 40 characters. A folder holds three files, each readable by its owner alone: `agent.toml`
and `user.toml` (a pair each) and `authorized.toml` (public keys with a name and a role).
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import tomli_w
from msgspec import Meta

from trainctl.protocol.config import names, validation_errors
from trainctl.protocol.config.addresses import Key, check_public
from trainctl.protocol.config.names import config_folder
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.files.durable_files import make_folder, replaced, sync

Role = Literal["viewer", "operator", "node"]
"""viewer: reads. operator: reads and sends every verb. node: another node's agent, which sends no verbs."""
ROLES: tuple[Role, ...] = get_args(Role)
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}\Z"
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One party's keys; the secret never leaves its file but for the socket it is set on."""

    name: Name
    public: Key
    secret: Key

    def __repr__(self) -> str:
        return f"KeyPair({self.name!r}, {self.public!r})"

    @classmethod
    def new(cls, name: str) -> "KeyPair":
        """A fresh pair. Raises InvalidInputError for a name that is none."""
        import zmq

        check_name(name)
        while True:
            public, secret = (key.decode() for key in zmq.curve_keypair())
            if not public.startswith("-"):  # on a command line that would be an option
                return cls(name, public, secret)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public key that may do something here."""

    public: Key
    role: Role
    since: float  # Unix seconds


class Revoked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public key that may do nothing here, whatever else names it."""

    public: Key
    since: float  # Unix seconds


class Authorized(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """authorized.toml. The role `node` is for the node of the entry's own name."""

    keys: dict[Name, Entry] = {}
    revoked: dict[Name, Revoked] = {}

    def find(self, public: str) -> tuple[str, Entry] | None:
        """The name and the entry of a key, None for one that isn't there or is revoked."""
        if self.is_revoked(public):
            return None
        return next(((name, entry) for name, entry in self.keys.items() if entry.public == public), None)

    def is_revoked(self, public: str) -> bool:
        return any(entry.public == public for entry in self.revoked.values())


class KeyFolder:
    """The folder with one machine's keys. Whatever reads raises InvalidInputError naming the file."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: default_folder() if none is given."""
        self.path = path or default_folder()

    @property
    def authorized_path(self) -> Path:
        return self.path / "authorized.toml"

    def agent(self) -> KeyPair:
        """Return the pair with which this machine's agent proves itself."""
        return self._pair("agent")

    def user(self) -> KeyPair:
        """Return the pair with which the person, or a script, on this machine proves itself."""
        return self._pair("user")

    def has(self, which: Literal["agent", "user"]) -> bool:
        """Return whether the pair has been made."""
        return (self.path / f"{which}.toml").is_file()

    def _pair(self, which: str) -> KeyPair:
        path = self.path / f"{which}.toml"
        if not path.is_file():
            raise InvalidInputError(str(path), "no such key; create this machine's keys with: trainctl keys new")
        if (mode := path.stat().st_mode & 0o777) & 0o077:
            raise InvalidInputError(
                str(path), f"other users can read this secret (mode {mode:04o}); run: chmod 600 {path}"
            )
        return validation_errors.checked(validation_errors.read_toml(path, "key file"), KeyPair, str(path))

    def authorized(self) -> Authorized:
        """Return the keys that may do something here; none where there is no file."""
        path = self.authorized_path
        if not path.is_file():
            return Authorized()
        if path.is_symlink():
            raise InvalidInputError(str(path), "is a link; who may do what must stand in a file here: copy it")
        for place in (self.path, path):
            kept = place.stat()
            if kept.st_uid not in (os.getuid(), 0):
                raise InvalidInputError(str(place), "belongs to another user, who could let anyone in: chown it")
            if kept.st_mode & 0o022:
                problem = f"other users can write it (mode {kept.st_mode & 0o777:04o}), and so let anyone in"
                raise InvalidInputError(str(place), f"{problem}; run: chmod go-w {place}")
        return validation_errors.checked(validation_errors.read_toml(path, "list of keys"), Authorized, str(path))

    def make(self, name: str | None = None) -> tuple[str, ...]:
        """Make what is missing of the two pairs, and authorise a user's pair that was made as operator. `name`: the
        machine's, default its host name; the user's pair is named user@name. Gives which were made."""
        machine = check_name(name or names.node_name())
        wanted = {"agent": machine, "user": _as_name(f"{names.user_name()}@{machine}")}
        made = tuple(which for which in wanted if not (self.path / f"{which}.toml").exists())
        with self._locked():
            for which in made:
                pair = KeyPair.new(wanted[which])
                write_private(self.path / f"{which}.toml", msgspec.to_builtins(pair))
                if which == "user":
                    self._authorize(pair.name, pair.public, "operator")
        return made

    def authorize(self, name: str, public: str, role: Role) -> None:
        """Let a key do what its role allows; a name that is there already is given the new key and role. Raises
        InvalidInputError for what is no name, key or role, and for a key that has another name already."""
        check_name(name)
        check_public(public)
        if role not in ROLES:
            raise InvalidInputError("--role", f"{role!r} is not a role; the roles are {', '.join(ROLES)}")
        with self._locked():
            self._authorize(name, public, role)

    def _authorize(self, name: str, public: str, role: Role) -> None:
        table = self.authorized()
        same = table.find(public)
        if same is not None and same[0] != name:
            raise InvalidInputError("KEY", f"this key is already authorised as {same[0]} ({same[1].role})")
        revoked = {known: entry for known, entry in table.revoked.items() if entry.public != public}
        keys = {**table.keys, name: Entry(public=public, role=role, since=round(time.time(), 3))}
        self._write(Authorized(keys=keys, revoked=revoked))

    def revoke(self, name: str, public: str | None = None) -> str:
        """Let a key do nothing from now on, running agents included; gives the key. `public`: that of a key which this
        folder doesn't list, such as one that only the cluster file names. Raises InvalidInputError if there is none of
        that name."""
        with self._locked():
            table = self.authorized()
            entry = table.keys.get(name)
            key = entry.public if entry is not None else public
            if key is None:
                raise InvalidInputError("NAME", f"no key {name!r} here; known keys: {', '.join(table.keys) or 'none'}")
            keys = {known: other for known, other in table.keys.items() if other.public != key}
            revoked = Revoked(public=key, since=round(time.time(), 3))
            label = _free(name, {known: one.public for known, one in table.revoked.items()}, key)
            self._write(Authorized(keys=keys, revoked={**table.revoked, label: revoked}))
        return key

    def _write(self, table: Authorized) -> None:
        write_private(self.authorized_path, msgspec.to_builtins(table))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time; the folder is made, for its owner alone."""
        try:
            if not self.path.is_dir():
                make_folder(self.path.parent)
                self.path.mkdir(exist_ok=True, mode=0o700)
                sync(self.path.parent)
            self.path.chmod(0o700)
            descriptor = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise InvalidInputError(str(self.path), f"keys cannot be stored here: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def default_folder() -> Path:
    """$TRAINCTL_KEYS, or `keys` in the platform's configuration folder."""
    chosen = os.environ.get("TRAINCTL_KEYS")
    return Path(chosen) if chosen else config_folder() / "keys"


def check_name(name: str) -> str:
    """The name. Raises InvalidInputError if a key can't be called that."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise InvalidInputError(
            "NAME", f"{name!r} is not a name: use at most 64 letters, digits, '.', '_', '@', '+' and '-'"
        )
    return name


def write_private(path: Path, tables: dict[str, Any]) -> None:
    """Write a TOML file that no one but its owner can read at any moment, whole or not at all."""
    with replaced(path, 0o600) as file:
        tomli_w.dump(tables, file)


def _as_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._@+-]", "-", text).lstrip("._@+-")[:64] or "user"


def _free(name: str, taken: dict[str, str], public: str) -> str:
    """A name for a revoked key beside those of other keys that had the same one."""
    label, count = name, 1
    while taken.get(label, public) != public:
        count += 1
        label = f"{name[:60]}-{count}"
    return label
