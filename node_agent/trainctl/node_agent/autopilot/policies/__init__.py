"""One module for each policy, with its only instance as POLICY."""
