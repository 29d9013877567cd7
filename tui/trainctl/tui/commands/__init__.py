"""What a verb looks like to a person: forms, the `:` line, previews, prechecks, undo and dispatch; pure but for
dispatch, `command.py` (sends one) and `targets.py`. Imports state and text. `context` is what screens and dialogs know
of the program."""
