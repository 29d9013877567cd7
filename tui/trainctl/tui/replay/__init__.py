"""Plays a run directory in the same screens, at any point in time. Imports app and the layers below it."""
