"""A run directory in the same screens, with a place in time that moves. Imports app and what is below."""
