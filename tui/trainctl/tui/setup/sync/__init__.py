"""`trainctl cluster sync`: copies a run's model and data to its nodes by rsync, and compares their digests."""
