"""Adapters, trained alongside frozen weights: LoRA layers and their initial values, one module per library."""
