"""Keys of this machine, and the keyring that clients use. Imports nothing else of ours but errors and paths."""
