"""What crosses a wire or is kept: messages, codec, sockets, clients, the record and the run file."""

__version__ = "0.3.0.dev0"
"""Of trainctl and trainctl-client: both projects' builds read it here."""
