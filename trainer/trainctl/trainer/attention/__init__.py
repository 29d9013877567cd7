"""Attention: how the documents of a pack are kept apart, by a mask or by a kernel, one module per library."""
