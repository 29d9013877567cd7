"""User input as commands: forms, the `:` line, previews and undo. Pure except for `command.py` (sends a command),
`targets.py`, and `context`, the part of the program that screens and dialogs can use. Imports state and text."""
