"""The screens of the full-screen program, one a file; each makes lines from the app's state."""
