"""Parts that the other folders share: logs, atomic folders, model files, libraries, errors. Imports only protocol."""
