"""User input as commands: forms, the `:` line, dry runs in words, and undo. Pure except for `command.py` (sends a
command), `targets.py`, and `context`, the part of the program that screens and dialogs can use. Imports state and
text."""
