"""Precision: how trained weights are held and rounded in 16 bits, one module per library, and the loss scale of
float16."""
