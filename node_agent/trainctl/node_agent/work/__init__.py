"""Separate work, such as scoring: its lead, its journal, and the worker on each node."""
