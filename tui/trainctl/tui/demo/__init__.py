"""The parts of `trainctl demo` outside cli/demo: local agents, a small model, real text. Imports protocol only."""
