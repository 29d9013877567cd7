"""Samples: packing, the memory-mapped dataset, the permutation of positions, and batches."""
