"""Simulated runs: the real conductor and policies over simulated ranks, seeded, written into a real record."""
