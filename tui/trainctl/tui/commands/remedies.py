"""Remedies of a diagnosis as commands: which of them is a verb, and what its dialog is filled with."""

import shlex
from collections.abc import Iterable
from itertools import pairwise

from trainctl.protocol import messages as m


def first_command(remedies: Iterable[m.Remedy]) -> m.Remedy | None:
    """The first remedy that is a command to a run; None if none is."""
    return next((remedy for remedy in remedies if remedy.verb), None)


def values_of(remedy: m.Remedy) -> dict[str, str]:
    """What the command's dialog starts with, by field: of `trainctl send VERB FIELD=VALUE --node NODE` each field and
    the node."""
    words = shlex.split(remedy.command)
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    node = next((after for before, after in pairwise(words) if before == "--node"), None)
    return {**pairs, **({"node": node} if node is not None else {})}
