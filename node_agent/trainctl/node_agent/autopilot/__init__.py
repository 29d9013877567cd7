"""Policies that act automatically: pure functions from facts to proposals, one module each in policies/."""
