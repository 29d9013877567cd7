"""Alerts: what is watched in a run and its machines, when it is reported, kept and called about."""
