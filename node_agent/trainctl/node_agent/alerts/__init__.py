"""Alerts: what is watched in a run and its machines, when it is told, kept and called about."""
