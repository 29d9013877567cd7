"""This node's stored profiles, and the one that fits a rank, which its `ready` message then has."""

from pathlib import Path

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.calibration.peak import is_comparable
from trainctl.protocol.calibration.profile import (
    DeviceProfile,
    ProfileKey,
    ProfileSummary,
    all_profiles,
    key_of,
    profiles_of_key,
    summary,
    write_profile,
)
from trainctl.protocol.config.run_tables import RunFile


class StoredProfiles:
    """In the folder `profiles` of the agent's state."""

    def __init__(self, node: str, directory: Path) -> None:
        self._node, self._folder = node, directory / "profiles"
        self._key: tuple[m.Ready, RunFile, ProfileKey] | None = None  # the last one, and what it is of
        self._found: tuple[ProfileKey, int, ProfileSummary | None] | None = None  # the last key, and the folder's time

    def add(self, profile: DeviceProfile) -> None:
        """Raises OSError."""
        write_profile(self._folder, profile)

    def newest(self, limit: int) -> tuple[DeviceProfile, ...]:
        """The newest first."""
        return tuple(reversed(all_profiles(self._folder)[-limit:]))

    def comparable(self, profile: DeviceProfile) -> DeviceProfile | None:
        """The newest profile that tells whether the machine has become slower, of any versions of the libraries."""
        return next((one for one in self.newest(2**20) if is_comparable(one, profile)), None)

    def with_profile(self, message: m.FromTrainer, config: RunFile) -> m.FromTrainer:
        """A rank's message, with the profile that fits the rank if it says what the rank has loaded."""
        match message:
            case m.Ready():
                return msgspec.structs.replace(message, profile=self._fitting(message, config))
            case m.Alive(ready=ready) if ready is not None:
                told = msgspec.structs.replace(ready, profile=self._fitting(ready, config))
                return msgspec.structs.replace(message, ready=told)
            case _:
                return message

    def _fitting(self, ready: m.Ready, config: RunFile) -> ProfileSummary | None:
        """Read again only if the folder has changed: a rank repeats what it has loaded every second."""
        key = self._key_of(ready, config)
        changed = self._changed()
        if self._found is None or self._found[:2] != (key, changed):
            stored = profiles_of_key(self._folder, key)
            self._found = (key, changed, summary(stored[-1]) if stored else None)
        return self._found[2]

    def _key_of(self, ready: m.Ready, config: RunFile) -> ProfileKey:
        """Versions of packages are read from disk, so the last key is kept."""
        if self._key is None or self._key[0] != ready or self._key[1] is not config:
            key = key_of(
                config, self._node, backend=ready.backend, device=ready.device, model_digest=ready.model_digest
            )  # fmt: skip
            self._key = (ready, config, key)
        return self._key[2]

    def _changed(self) -> int:
        try:
            return self._folder.stat().st_mtime_ns
        except OSError:
            return 0
