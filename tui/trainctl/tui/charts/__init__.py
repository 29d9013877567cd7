"""Charts as lines of text: canvas, axis, scale, plots and layout; pure except for one widget."""
