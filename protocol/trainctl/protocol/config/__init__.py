"""The TOML files that people write, the names and addresses in them, and their validation errors. Imports only
errors."""
