"""The agent's role in a run, as one pure state, and changes of lead (election, votes, transfer)."""
