"""Runs that other programs train: they attach themselves, and the agent records and shows them."""
