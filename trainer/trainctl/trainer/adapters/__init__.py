"""Adapters, trained beside frozen weights: LoRA's layers and first values, one module a library that attaches it."""
