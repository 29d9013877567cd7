"""Policies that act automatically: pure functions from facts to proposals."""
