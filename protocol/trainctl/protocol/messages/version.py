"""The protocol's one integer version."""

from typing import Final

PROTOCOL_VERSION: Final = 1
"""Grows when a message changes in a way that a peer must know of; peers of unlike versions refuse each other. What each
number added is told, with its date, in tools/protocol_docs/history.py."""
