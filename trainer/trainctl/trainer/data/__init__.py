"""Samples: the token cache, the memory-mapped dataset, the permutation of positions, and batches."""
