"""Charts as lines of text: canvas, axis, scale, plots and layout; pure but for one widget."""
