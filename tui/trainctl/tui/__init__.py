"""Everything a person or a script types at: the command line and the full-screen program."""
