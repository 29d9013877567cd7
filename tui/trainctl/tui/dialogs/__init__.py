"""Dialogs over a screen: command forms, the split editor, help, details. Imports widgets, charts and the layers below
them."""
