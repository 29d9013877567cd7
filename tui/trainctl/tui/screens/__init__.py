"""The screens: one file each, next to a pure file that makes its lines. Imports dialogs, widgets, charts and the layers
below them; only app and replay import it."""
