"""Keys of this machine, and the keyring that clients use. Imports only errors and config."""
