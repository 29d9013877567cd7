"""What this agent is for a run, as one pure state (role), and how leadership moves (election, votes, transfer)."""
