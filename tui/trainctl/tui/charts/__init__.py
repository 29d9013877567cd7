"""Charts as lines of text: canvas, axes, plots and layout; pure."""
