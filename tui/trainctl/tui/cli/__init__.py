"""The command line: one file per subcommand, and code that they share. May import every other folder; nothing imports
it."""
