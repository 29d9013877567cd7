"""Simulated runs: the real conductor and policies over simulated ranks, seeded, written into a real record; or real
agents whose trainers are simulated, in real time."""
