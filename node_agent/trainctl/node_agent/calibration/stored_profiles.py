"""This node's stored profiles: the one that fits a rank, which its `ready` message then has, and what its steps add."""

import statistics
from collections import defaultdict, deque
from pathlib import Path
from typing import Final

import msgspec

from trainctl.protocol.calibration.peak import is_comparable
from trainctl.protocol.calibration.profile import (
    MAX_PASSES,
    DeviceProfile,
    Pass,
    ProfileKey,
    ProfileSummary,
    all_profiles,
    key_of,
    profiles_of_key,
    summary,
    write_profile,
)
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import Alive, FromTrainer, Ready, Report

MIN_STEPS: Final = 20
"""Steps with one micro-batch whose median teaches a profile."""
MAX_STEPS: Final = 200
"""Steps with one micro-batch that are remembered, the newest."""


class StoredProfiles:
    """The folder `profiles` of the agent's state."""

    def __init__(self, node: str, directory: Path) -> None:
        self._node, self._folder = node, directory / "profiles"
        self._fitting: tuple[object, ProfileKey, ProfileSummary | None] | None = None  # of the rank that spoke last
        self._passes: dict[ProfileKey, dict[int, deque[Pass]]] = {}  # that ranks showed, by micro-batch

    def add(self, profile: DeviceProfile) -> None:
        """Raises OSError."""
        write_profile(self._folder, profile)
        self._fitting = None

    def newest(self, limit: int) -> tuple[DeviceProfile, ...]:
        """Return the newest profiles, the newest first."""
        return tuple(reversed(all_profiles(self._folder)[-limit:]))

    def comparable(self, profile: DeviceProfile) -> DeviceProfile | None:
        """Return the newest profile that shows whether the machine has become slower, of any versions of the
        libraries."""
        return next((stored for stored in self.newest(2**20) if is_comparable(stored, profile)), None)

    def with_profile(self, message: FromTrainer, config: RunFile) -> FromTrainer:
        """Return a rank's message, with the profile that fits the rank if it says what the rank has loaded."""
        match message:
            case Ready():
                return msgspec.structs.replace(message, profile=self._profile(message, config))
            case Alive(ready=ready) if ready is not None:
                fitting = msgspec.structs.replace(ready, profile=self._profile(ready, config))
                return msgspec.structs.replace(message, ready=fitting)
        return message

    def show(self, step: Report) -> None:
        """Remember how long a rank's passes took in a step."""
        if step.kind != "train" or not step.own_samples or step.replays:
            return
        micro = min(step.micro_batch, step.own_samples)
        seconds = (step.phases.forward + step.phases.backward) * micro / step.own_samples
        if self._fitting is not None and seconds > 0:
            peak = step.values.get("memory_peak_bytes")
            shown = self._passes.setdefault(self._fitting[1], defaultdict(lambda: deque(maxlen=MAX_STEPS)))
            shown[micro].append(Pass(micro, seconds, int(peak) if peak is not None else None))

    def learn(self) -> None:
        """Store what ranks of ended runs showed beside a calibration of the same key. Only faster passes teach, because
        other work on the machine makes passes slower, and the alert on calibrated speed needs the faster ones: of a
        size that was calibrated, or of another one that beats all of them. Raises OSError."""
        while self._passes:
            key, shown = self._passes.popitem()
            profile = next(iter(profiles_of_key(self._folder, key)[-1:]), None)
            if profile is None:
                continue
            passes = {timed.micro: timed for timed in profile.passes}
            best = max(timed.rate for timed in profile.passes)
            for micro, steps in shown.items():
                seconds = statistics.median(step.seconds for step in steps)
                timed = passes.get(micro, steps[-1])
                is_faster = micro / seconds > (timed.rate if micro in passes else best)
                if is_faster and len(steps) >= MIN_STEPS and (micro in passes or len(passes) < MAX_PASSES):
                    passes[micro] = msgspec.structs.replace(timed, seconds=seconds)
            learned = tuple(passes[micro] for micro in sorted(passes))
            if learned != profile.passes:
                self.add(msgspec.structs.replace(profile, passes=learned))

    def _profile(self, ready: Ready, config: RunFile) -> ProfileSummary | None:
        """Return the newest profile that fits a rank. Versions of packages take 10 ms to read, and a rank repeats what
        it has loaded every second: it is looked for once for each process."""
        process = ready.pid, ready.backend, ready.device, ready.model_digest, config
        if self._fitting is None or self._fitting[0] != process:
            device, digest = ready.device, ready.model_digest
            key = key_of(config, self._node, backend=ready.backend, device=device, model_digest=digest)
            stored = profiles_of_key(self._folder, key)
            self._fitting = (process, key, summary(stored[-1]) if stored else None)
        return self._fitting[2]
