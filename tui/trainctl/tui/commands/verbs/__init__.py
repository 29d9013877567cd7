"""Verbs by what they act on, each with its dialog, first line, undo and key. Pure."""
