"""The full-screen program: the Textual app, its keys, configuration and command palette. Imports screens and dialogs;
only cli and replay import it."""
