"""Trainer processes: starting them under a shim, supervising them, adopting them after an agent restart, and finding
why they ended."""
