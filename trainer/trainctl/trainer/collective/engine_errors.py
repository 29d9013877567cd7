"""What an engine's error means, in plain words that name the peer where its text or its addresses tell which. Pure."""

import re
from collections.abc import Collection, Mapping, Sequence

_PATTERNS = {
    r"Connection reset by peer|Broken pipe": "connection to {peer} was reset",
    r"Connection closed by peer|Connection was likely closed|got 0 bytes": "connection to {peer} was closed",
    r"connection to a peer was lost": "connection to {peer} was lost",
    r"Connection refused": "{peer} refused the connection",
    r"Connection timed out|socket has timed out|Timed out waiting|wait timeout": "{peer} did not answer in time",
    r"No route to host|Network is unreachable": "no route to {peer}",
    r"Couldn't connect": "could not connect to {peer}",
}
_STORE = re.compile(r"Failed to recv|client socket has timed out")
"""Errors of gloo's rendezvous store, which the first rank serves."""
_ADDRESS = re.compile(r"\[([\w.:%-]+)\]:(\d+)")


def plain(text: str, peer: str | None, own_log: str, what: str) -> str:
    """An engine's error for a person; `own_log` names the rank whose log has `text`, `what` failed."""
    for pattern, meaning in _PATTERNS.items():
        if re.search(pattern, text):
            return meaning.format(peer=peer or "a peer")
    return f"{what} failed (details in the log of {own_log})"


def lost_peer(
    text: str, own: int, endpoints: Sequence[Sequence[str]], ports: Mapping[int, Collection[int]]
) -> int | None:
    """The place in the engine of the rank that an error is about; None if it can't be told. `endpoints` are the ranks'
    host:port by place, `ports` the TCP ports of those ranks' processes that are known.

    gloo prints a peer's port with its two bytes swapped, so both orders count.
    """
    others = [place for place in range(len(endpoints)) if place != own]
    if len(others) == 1:
        return others[0]
    if _STORE.search(text):
        return 0 if own != 0 else None
    found = _ADDRESS.search(text)
    if found is None:
        return None
    host, port = found[1], int(found[2])
    near = [place for place in others if endpoints[place][0].rsplit(":", 1)[0] == host]
    if len(near) > 1:
        near = [place for place in near if {port, _swapped(port)} & {*ports.get(place, ())}]
    return near[0] if len(near) == 1 else None


def _swapped(port: int) -> int:
    return (port & 0xFF) << 8 | port >> 8 & 0xFF
