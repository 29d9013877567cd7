"""Every verb with its dialog, first line, undo and key: a table for each group. Pure."""

from collections.abc import Mapping
from typing import Final

from trainctl.protocol.messages.verbs import VERBS
from trainctl.tui.commands.verb_description import VerbDescription
from trainctl.tui.commands.verbs import plan, run_life

_BY_NAME = {described.name: described for group in (run_life, plan) for described in group.DESCRIPTIONS}
DESCRIPTIONS: Final[Mapping[str, VerbDescription]] = {name: _BY_NAME[name] for name in VERBS}
"""Descriptions by verb, in the protocol's order."""
