"""A run directory in the same screens, with a place in time that moves."""
