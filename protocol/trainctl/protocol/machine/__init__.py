"""This machine: hardware, installation, file digests, adverts for discovery, imports of large modules, and processes
under a shim."""
