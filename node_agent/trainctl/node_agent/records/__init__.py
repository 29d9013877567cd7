"""SQLite files: the agent's database, a run's record, and replication of records between nodes."""
