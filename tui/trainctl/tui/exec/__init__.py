"""`trainctl exec`: a command as a run, its output as the run's log, and its metrics from files."""
