"""Device profiles: what calibration measures, how its sweep ends, and their files. Imports only config and errors."""
