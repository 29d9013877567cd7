"""`trainctl demo` behind its command (cli/demo): local agents, a real small model, real text. Imports protocol only."""
