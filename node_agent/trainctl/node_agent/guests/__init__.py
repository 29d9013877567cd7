"""Runs that other programs train and attach, by key or over a Unix socket: the agent records and shows them, and sends
their loops commands."""
