"""The profile of this node for a run: measured in processes of its own, with the model's files checked around it."""

import time
from collections.abc import Callable
from pathlib import Path

from trainctl.protocol.calibration.profile import DeviceProfile, key_of
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.trainer.calibration.findings import Findings
from trainctl.trainer.calibration.measuring_process import measured
from trainctl.trainer.calibration.stages import StageRelay


def node_profile(
    config: RunFile, file: Path, node: str, caches: Path, say: Callable[[str], None], stages: StageRelay | None = None
) -> DeviceProfile:
    """For the run file that lies in `file`; `config` is as this machine has it. `say` receives the progress, and may
    end everything by an exception. `stages`: of a calibration beside others. The model's files are
    read again only if their sizes or times have changed. Raises TrainctlError if not even one sample fits, or the
    model's files change meanwhile; OSError."""
    begun, model = time.monotonic(), Path(config.model.path)
    before, digest = _stamps(model), model_digests(model).whole
    caches.mkdir(parents=True, exist_ok=True)
    ends = begun + config.calibration.seconds
    arguments = [str(file), "--node", node, "--caches", str(caches), "--ends", str(ends)]
    found = measured(Findings(), arguments, say, stages)
    if _stamps(model) != before and model_digests(model).whole != digest:
        raise InvalidInputError(str(model), "the model's files changed during the calibration; calibrate again")
    return DeviceProfile(
        key=key_of(config, node, backend=found.backend, device=found.device, model_digest=digest),
        created_at=time.time(), duration_seconds=time.monotonic() - begun, passes=found.passes,
        out_of_memory_micro=found.out_of_memory_micro, grid=found.grid, optimizer_seconds=found.optimizer_seconds,
        forward=found.forward, matmul=found.matmul, memory_bytes_per_second=found.memory_bytes_per_second,
        memory_cap_bytes=found.memory_cap_bytes, disk=found.disk, data=found.data,
    )  # fmt: skip


def _stamps(model: Path) -> dict[Path, tuple[int, int]]:
    """Size in bytes and time of change in ns of each of the model's files."""
    found = {file: file.stat() for file in sorted(model.rglob("*"))}
    return {file: (of.st_size, of.st_mtime_ns) for file, of in found.items()}
