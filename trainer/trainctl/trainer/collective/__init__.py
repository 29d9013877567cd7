"""Groups of ranks: membership, the shared buffer, reducer processes and their engines."""
