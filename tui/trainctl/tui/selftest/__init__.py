"""`trainctl selftest`: checks one machine with real agents and ranks, and writes one file. Imports demo, doctor."""
