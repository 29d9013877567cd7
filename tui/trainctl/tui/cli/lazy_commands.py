"""The subcommands of other files, each loaded and built when it is asked for: a command starts with its own alone."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import typer

from trainctl.protocol.errors import InvalidInputError

FILES = {
    "run": "run", "check": "run",
    "ls": "runs", "runs": "runs",
    "status": "inspect", "alerts": "inspect", "policies": "inspect", "watch": "inspect",
    "diagnose": "inspect", "report": "inspect", "diff": "inspect",
    "events": "inspect", "logs": "inspect",
    "send": "send", "profile": "send", "promote": "send",
    "replay": "replay_export", "export": "replay_export", "export-model": "replay_export", "score": "replay_export",
    "simulate": "replay_export", "mirror": "replay_export",
    "config": "config", "keys": "keys", "init": "init", "quantize": "init", "data": "run", "doctor": "doctor",
    "calibrate": "doctor", "advise": "advise", "bench": "advise",
    "discover": "cluster", "cluster": "cluster", "help": "help_topics",
}  # fmt: skip
"""Where each is, in the order of the help."""
CHANGING = frozenset({
    "run", "send", "profile", "promote", "demo", "score", "init", "keys new", "keys authorize", "keys revoke",
    "cluster add", "cluster remove", "cluster sync", "calibrate", "bench", "runs rename", "runs remove",
})  # fmt: skip
"""Those that change a run, the cluster, or who may do what: `--read-only` refuses them."""


WRITING = frozenset({"export-model", "quantize", "mirror"})
"""Those that leave files, and change nothing else."""


def has_effect(words: Sequence[str]) -> bool:
    """Return whether a command line, from the command's name on, does more than print."""
    if {"-h", "--help"} & {*words}:
        return False
    writes = words[0] in WRITING or any(word.split("=")[0] == "--output" for word in words)
    return writes or _changing(words) is not None


def _changing(words: Sequence[str]) -> str | None:
    """Return the name of the command if it changes something."""
    names = [word for word in words[:2] if not word.startswith("-")]
    if words[0] == "alerts" and "--test" in words:
        return "alerts --test"
    return next((name for name in (words[0], " ".join(names)) if name in CHANGING), None)


def refuse_changes(words: Sequence[str]) -> None:
    """Check a command line, without the program's own options. Raises InvalidInputError if it would change
    something."""
    if (changing := _changing(words)) is not None:
        raise InvalidInputError(
            "--read-only", f"{changing} isn't read-only: leave out --read-only, or use status, watch or attach"
        )


SUMMARIES = {
    "demo": "Train a small real model with a few agents on this machine.",
    "run": "Start or resume a run.",
    "check": "Check a run file and report every problem.",
    "alerts": "List the open alerts, urgent ones first.",
    "policies": "Show what each policy sees, would do next, and did.",
    "diagnose": "Say why a run is slow or stuck, and what to do about it.",
    "report": "Report on a run as one page, from its record.",
    "diff": "Say how two runs differ, and at which step.",
    "watch": "Print each step and event as it happens, until Ctrl-C.",
    "events": "Print a run's events: commands, checkpoints, faults.",
    "logs": "Print a trainer's log, or with --all every node's log.",
    "send": "Send a command to a run; see `trainctl send VERB --help`.",
    "profile": "Record how long each operator takes in the next steps.",
    "promote": "Make another node the lead.",
    "replay": "Replay a run in the full screen, from its directory.",
    "export": "Export a run as a table: CSV, JSON lines or Parquet.",
    "export-model": "Export a trained model for peft, mlx-lm or transformers.",
    "score": "Compute log-probabilities or answers for rows of a file.",
    "simulate": "Simulate a run over machines that a file describes.",
    "mirror": "Copy a run to TensorBoard or W&B, live or afterwards.",
    "config": "Print the full screen's effective settings.",
    "init": "Create a starter run.toml and cluster.toml.",
    "quantize": "Make a quantized copy of a model for QLoRA.",
    "doctor": "Check the cluster's machines and suggest fixes.",
    "calibrate": "Measure each node's fastest micro-batch and its parts.",
    "advise": "Advise on nodes for a run: speed, time, cost, settings.",
    "bench": "Compare settings of a run by short real runs here.",
    "discover": "List the agents advertised on the network.",
    "help": "Print a documentation page, offline.",
}
"""The line that the help gives each, of at most 64 characters: whole at 80 columns. Others' first sentence fits."""


class LateCommands(Mapping[str, Any]):
    """The commands of `own`, then those of FILES, each completed as it is built."""

    def __init__(self, own: Mapping[str, Any], complete: Callable[[Any], None]) -> None:
        self._built, self._complete = dict(own), complete
        self._names = [*own, *FILES]
        for command in own.values():
            complete(command)

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            module = importlib.import_module(f"trainctl.tui.cli.{FILES[name]}")
            found = typer.main.get_group(module.app).commands
            for command in found.values():
                self._complete(command)
            self._built |= found
        command = self._built[name]
        command.short_help = SUMMARIES.get(name, command.short_help)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
