"""What people type and choose: forms, the `:` line, previews, undo and dispatch; pure but for dispatch, `command.py`
(sends one) and `targets.py`. Imports state and text. `context` is what screens and dialogs know of the program."""
