"""Verbs by what they act on, each with its dialog, preview, precheck, undo and key. Pure."""
