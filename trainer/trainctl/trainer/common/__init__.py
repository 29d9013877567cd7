"""What the other folders share: logs, atomic folders, model files and errors. Imports only protocol."""
