"""The command line: one file per group of subcommands, and code that they share. May import every other folder; nothing
imports it."""
