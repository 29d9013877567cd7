"""User input as commands: forms, the `:` line, previews, undo and dispatch. Pure except for dispatch, `command.py`
(sends a command) and `targets.py`. Imports state and text. `context` is the part of the program that screens and
dialogs can use."""
