"""`trainctl doctor`: what is wrong with the machines of a cluster, and what to do about it. Imports protocol only."""
