"""Trainer processes: started under a shim, supervised, adopted by a restarted agent, and the reasons why they ended."""
