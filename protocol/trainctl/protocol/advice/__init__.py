"""Advice before a run: which nodes, in step or apart, how long, at what cost, and what would change that. Pure.

It computes on plain facts: a run file's settings, nodes' profiles and device tables. Imports batch and the
folders below it.
"""
