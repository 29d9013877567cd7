"""The agent's role in a run, as one value with its transitions; what it does as lead and as follower; and changes of
lead (election, transfer)."""
