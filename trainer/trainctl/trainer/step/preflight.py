"""A rank's reports once its data and its model are loaded: that it is ready, and before that, the preflight.

The preflight of a run's first start has all that the group is judged by: digests, engines, and the probe. It comes
before a reference pass, which takes minutes, so that a run that can't start is refused at once.
"""

import os
import platform
from collections.abc import Callable
from pathlib import Path

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.machine.cgroups import core_pool, usable_cores
from trainctl.protocol.machine.file_digests import FileDigests
from trainctl.trainer.backends.base import Backend
from trainctl.trainer.collective import engines
from trainctl.trainer.collective.shared_buffer import Layout, layout_digest
from trainctl.trainer.common.model_files import model_family
from trainctl.trainer.data.growing_dataset import TrainingData
from trainctl.trainer.step import probe
from trainctl.trainer.step.rank import Identity

_BEFORE_THE_FIRST = m.Generation(0, 0)


def ready(
    who: Identity, backend: Backend, data: TrainingData, model: FileDigests, *, last_step: int = 0, cursor: int = 0
) -> m.Ready:
    """Return the message that a rank has loaded `data` and the model with the digests `model`."""
    layout = Layout(backend.shapes, layout_digest(backend.shapes))
    return m.Ready(
        run=who.run,
        rank=who.rank,
        pid=os.getpid(),
        backend=backend.name,
        device=backend.device,
        parameters=layout.elements,
        samples=data.samples,
        held_out=data.held_out,
        mean_weight=data.mean_weight,
        layout_digest=layout.digest,
        model_digest=model.whole,
        data_digest=data.digest,
        last_step=last_step,
        cursor=cursor,
        memory_cap_bytes=backend.memory().cap_bytes,
        system=platform.system(),
        engines=engines.installed(),
        model_files=model.files,
        data_files=data.files,
        compute=backend.compute,
        machine=core_pool(),
        cores=usable_cores(),
    )


def preflight(
    who: Identity, config: RunFile, backend: Backend, data: TrainingData, model: FileDigests, check: Callable[[], None]
) -> m.Preflight:
    """Run the probe, and return what the group is judged by. Raises TrainctlError if memory doesn't suffice, and what
    `check` raises before each pass."""
    batch = data.probe_batch()
    log_probabilities, noise = probe.probe(backend, batch, tf32=config.model.tf32, check=check)
    report = m.Report(
        run=who.run, rank=who.rank, generation=_BEFORE_THE_FIRST, seq=0, kind="probe", step=0, loss_sum=0.0,
        weight=0.0, own_weight=0.0, own_samples=0,
    )  # fmt: skip
    family = model_family(Path(config.model.path))
    probed = probe.probed(report, backend, batch, family, log_probabilities, noise)
    return m.Preflight(ready(who, backend, data, model), probed)
