"""Samples: tokenizing, the memory-mapped token cache, the permutation of positions, and batches."""
