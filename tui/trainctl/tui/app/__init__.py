"""The full-screen program: the Textual app, its keys, configuration and command palette."""
