"""W&B as a mirror's target: one run there, written by the wandb library; offline, a folder to upload later.

W&B's history only grows. So a step that is redone is a further row with the same `step` and a higher `attempt`, and the
row that was retracted stays. `_step`, W&B's own counter, is the mirror's count of rows.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainctl.protocol.errors import InvalidInputError, UnreachableError, installing
from trainctl.tui.export.mirror.metrics import Point, Text

# The library would report its own faults over the network, from threads that it never ends.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
try:
    import wandb
except ImportError:
    raise InvalidInputError("--to", f"wandb needs its library; {installing('wandb')}") from None


def check_key() -> None:
    """Raise InvalidInputError if nothing could be uploaded, for nobody has logged in."""
    if not wandb.login(prompt=False):
        raise InvalidInputError("--to", "W&B has no API key: run `wandb login`, or add --offline")


class WeightsBiases:
    """A session of the W&B run whose id is the run's. The library writes for sure only as it finishes: a session that
    was cut off is dropped by the next, which mirrors its steps again under the same numbers."""

    name = "wandb"
    forgets, at_end = False, True

    def __init__(
        self,
        folder: Path,
        run: str,
        project: str,
        config: Mapping[str, Any],
        whole: tuple[str, ...],
        *,
        name: str,
        offline: bool,
    ) -> None:
        """`whole`: the sessions in `folder` that were finished. Raises InvalidInputError, UnreachableError."""
        self._offline = offline
        _drop_cut_off(folder / "wandb", whole)
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        try:
            self._run = wandb.init(
                project=project,
                id=run,
                name=name,
                dir=str(folder),
                config=dict(config),
                resume="allow",
                mode="offline" if offline else "online",
                settings=settings,
            )
        except wandb.Error as error:
            wandb.teardown()
            raise UnreachableError(f"wandb: {error}") from None
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @property
    def url(self) -> str | None:
        """Return where the run is shown; None offline."""
        return None if self._offline else str(self._run.url)

    def back(self, step: int) -> None:
        """Nothing can be taken back; rows from here on have a higher attempt."""

    def point(self, point: Point, number: int, attempt: int) -> None:
        self._log(number, {"step": point.step, "attempt": attempt, **point.values})

    def evaluation(self, step: int, values: Mapping[str, float], at: float, number: int) -> None:
        self._log(number, {"step": step, **values})

    def text(self, text: Text, number: int) -> None:
        self._log(number, {"step": text.step, text.kind: text.text})

    def flush(self) -> None:
        """The library writes when it likes."""

    def close(self, *, failed: bool) -> str:
        """Ends the library's process too. The session's name is that of its folder."""
        session = Path(self._run.dir).parent.name
        self._run.finish(exit_code=1 if failed else 0)
        wandb.teardown()
        return session

    def _log(self, number: int, row: dict[str, Any]) -> None:
        self._run.log(row, step=number)


def _drop_cut_off(folder: Path, whole: tuple[str, ...]) -> None:
    """Sessions that did not finish: what they would upload is mirrored again."""
    for session in folder.glob("offline-run-*"):
        if session.is_dir() and session.name not in whole:
            shutil.rmtree(session)
