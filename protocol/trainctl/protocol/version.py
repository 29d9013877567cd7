"""The protocol's one integer version and the dated history of what each number added."""

from typing import Final

PROTOCOL_VERSION: Final = 1
"""Grows when a message changes in a way that a peer must know of; peers of unlike versions refuse each other."""

HISTORY: Final[tuple[tuple[int, str, str], ...]] = (
    (1, "2026-11-20", "Attach (snapshot, live messages, gap filling), commands, plans and reports, groups, peers."),
    (1, "2026-11-22", "facts-request and digests-request, for the doctor."),
    (
        1,
        "2026-11-22",
        "Keys: not-authorised refusals, keys of other agents (PeerView.key, Refusal.lead_key), the audit.",
    ),
)
"""(version, date, what it added), oldest first."""
