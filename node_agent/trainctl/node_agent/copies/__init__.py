"""Copies of this node's checkpoints elsewhere: which are due, and the process that makes them."""
