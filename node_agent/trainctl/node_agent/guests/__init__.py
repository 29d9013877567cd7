"""Runs that other programs train and attach; the agent records and shows them."""
