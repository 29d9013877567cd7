"""What the other folders share: logs, atomic folders, model files, imports without torch, and errors. Imports only
protocol."""
