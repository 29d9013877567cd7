"""The supply of a growing file: how much of it each rank can train on, and whether all ranks have the same of it.

A step is planned only when all live ranks have its samples, so ranks that wait for data wait for a plan: commands, and
everything else that happens between steps, go on as usual.
"""

from trainctl.node_agent.conductor.rendezvous import Rendezvous
from trainctl.node_agent.conductor.state import ConductorState
from trainctl.protocol import messages as m


class DataSupply:
    """Is given what ranks have sealed."""

    def __init__(self, state: ConductorState, rendezvous: Rendezvous) -> None:
        self._state, self._rendezvous = state, rendezvous
        self._known: dict[int, tuple[str, int]] = {}  # by number of chunks: their digest, and the rank that said so

    def on_sealed(self, sealed: m.Sealed) -> str:
        """Take what a rank has. Gives why it can't take part, if another rank had other chunks before it."""
        digest, rank = self._known.setdefault(sealed.chunks, (sealed.digest, sealed.rank))
        if digest != sealed.digest:
            names = self._state.settings.label(sealed.rank), self._state.settings.label(rank)
            return f"the growing data of {names[0]} and {names[1]} differ within their first {sealed.chunks} chunks"
        self._rendezvous.ranks[sealed.rank].sealed = sealed
        return ""

    def lacking(self, stop: int) -> str:
        """What a growing file lacks for the positions below `stop`, in words; empty if all live ranks have them."""
        live = [at.sealed for at in self._rendezvous.live.values()]
        if all(sealed is not None and (sealed.ended or sealed.samples >= stop) for sealed in live):
            return ""
        least = min(sealed.samples if sealed is not None else 0 for sealed in live)
        return f"waiting for data: {least:,} samples sealed, the next step needs {stop:,}"

    @property
    def samples(self) -> int | None:
        """Samples that all live ranks have; None if the file doesn't grow."""
        sealed = [at.sealed for at in self._rendezvous.live.values()]
        return min((one.samples for one in sealed if one is not None), default=0) if any(sealed) else None
