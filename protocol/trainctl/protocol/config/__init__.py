"""The TOML files that people write: run file, cluster file, alert rules, and their validation errors."""
