"""Policies, which decide by themselves: pure functions of facts to proposals, a module for each in policies/."""
