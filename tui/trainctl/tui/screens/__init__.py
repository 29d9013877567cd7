"""The screens, one a file beside the pure file that makes its lines. Imports dialogs, widgets, charts and what is
below; only app and replay import it."""
