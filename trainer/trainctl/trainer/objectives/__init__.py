"""Objectives: from a model's outputs on a batch to named sums and weights."""
