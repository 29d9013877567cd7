"""`trainctl advise`: what is known of the nodes, by files or agents, and the advice as text. Imports setup, doctor."""
