"""The command line: one file a subcommand, and what they share. May import every other folder; nothing imports it."""
