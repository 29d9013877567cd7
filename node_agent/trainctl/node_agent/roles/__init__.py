"""What this agent is for a run: its lead or a follower, and how leadership moves (election, votes, transfer)."""
