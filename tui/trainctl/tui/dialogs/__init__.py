"""Dialogs over a screen: command forms, the split editor, help, details."""
