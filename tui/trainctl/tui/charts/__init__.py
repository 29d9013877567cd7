"""Charts as plain lines of text: a dot canvas, and panels with axes, labels and event marks around it."""
