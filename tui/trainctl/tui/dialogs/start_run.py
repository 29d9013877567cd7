"""The dialogs that start a run: from a run file of this machine, or from a checkpoint of another run."""

import shlex
from pathlib import Path
from typing import Any

from trainctl.protocol.config.objectives import sample_unit
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import verbs
from trainctl.tui.commands import arguments, forms
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.targets import is_local, run_file
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.text.styled_line import Piece, clean


class StartDialog(CommandDialog):
    """Reads the file as it is named, and says what it would start or what is wrong with it."""

    def made_order(self) -> Order:
        """Raises InvalidInputError naming the file, and the setting that is wrong in it."""
        text = self.values()["file"].strip()
        if not text:
            raise InvalidInputError("run file", "give its path, such as examples/run.toml")
        path = Path(text).expanduser()
        if not path.is_file():
            raise InvalidInputError(text, "no such file on this machine: check the path")
        return Order("start-run", {"config": run_file(path, {}, local=self._agent_is_here()).message})

    def _agent_is_here(self) -> bool:
        try:
            return is_local(self.owner.address)
        except InvalidInputError:
            return False

    @property
    def _is_untouched(self) -> bool:
        return False  # what is wanted of an empty field is worth saying: an example of a path

    def finding(self, order: Order) -> Piece:
        """What the file would start."""
        config: dict[str, Any] = order.args["config"]
        run, batch = config.get("run", {}), config.get("batch", {})
        nodes = ", ".join(config.get("nodes", {})) or "every node of the cluster"
        unit = sample_unit(config.get("objective", {}).get("kind", ""))
        told = f"{run.get('name')}: {run.get('steps'):,} steps of {batch.get('global')} {unit} on {nodes}"
        return Piece(clean(told), "strong")


class BranchDialog(CommandDialog):
    """Starts a run from a checkpoint of another one, with settings changed."""

    def __init__(self, run: str) -> None:
        super().__init__(forms.branch_form(run))
        self._run = run

    def made_order(self) -> Order:
        """Raises InvalidInputError naming the field that is wrong."""
        values = self.values()
        step, settings = values["step"].strip(), values["settings"]
        try:
            words = shlex.split(settings)
        except ValueError as error:
            raise InvalidInputError("settings", str(error).lower()) from None
        given = {"branch": f"{self._run}@{step}" if step else self._run, **arguments.pairs(words, "settings")}
        args = verbs.parse_args("start-run", given)
        verbs.check("start-run", args)
        return Order("start-run", args)

    @property
    def _is_untouched(self) -> bool:
        return False  # empty fields mean something: what is worth saying
