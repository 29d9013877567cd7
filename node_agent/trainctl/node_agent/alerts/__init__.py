"""Alerts: the conditions on runs and machines, the open alerts, mutes, and calls of hooks."""
