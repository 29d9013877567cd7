"""The calibration before a rank's first start in a run, if its node has no profile that fits."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from trainctl.protocol.calibration import profile_file
from trainctl.protocol.calibration.profile_key import key_of
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.protocol.messages import Preflight
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer.backends.load import backend_of
from trainctl.trainer.calibration.measuring_process import NewGroup
from trainctl.trainer.calibration.node_profile import node_profile
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.logs import log
from trainctl.trainer.step.rank import Identity

NEVER: Final = "TRAINCTL_CALIBRATION"
"""Environment variable: with the value `never`, no start on this node calibrates, whatever the run file says."""


def calibrate_at_start(
    paths: RunPaths, who: Identity, say: Callable[[str], None], take: Callable[[Preflight], None]
) -> None:
    """Measure and store a profile, where the run file wants one and none fits. `take` gets a group's preflight before
    anything is measured. A failure only costs the profile. Raises TrainctlError for a run file that can't be used, and
    what `say` does."""
    node = who.node
    config = run_file.on_this_machine(run_file.read(paths.run_file), node)
    if not _is_wanted(config) or paths.rank_record(who.rank).exists() or run_file.grows(config):
        return  # a rank with a record has trained before
    run_file.check_paths(config, "run file", node)
    profiles = paths.node_data.parent / "profiles"
    try:
        model = model_digests(Path(config.model.path)).whole
        if _fits(config, node, profiles, model):
            return
        caches = run_file.cache_folder(config, node, paths.node_data)
        group = NewGroup(who.run, who.rank, take) if len(config.nodes) > 1 else None
        profile = node_profile(config, paths.run_file, node, caches, say, model_digest=model, group=group)
        profile_file.write(profiles, profile)
    except (TrainctlError, OSError) as error:
        log.warning("not calibrated: %s", first_line(error))
        return
    log.info("calibrated in %.0f s; the profile is in %s", profile.duration_seconds, profiles)


def _is_wanted(config: RunFile) -> bool:
    return config.calibration.at_start == "missing" and os.environ.get(NEVER) != "never"


def _fits(config: RunFile, node: str, profiles: Path, model: str) -> bool:
    """Whether a stored profile fits, as far as that shows without the device, which only loading tells: the run file's
    choice of device is among the settings."""
    stored = profile_file.all_stored(profiles)
    if not stored:
        return False
    backend = backend_of(config, config.nodes.get(node, NodeTable()), "run file")
    key = key_of(config, node, backend=backend, device="any", model_digest=model)
    return any(msgspec.structs.replace(one.key, device="any") == key for one in stored)
