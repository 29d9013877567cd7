"""This machine: hardware, installation, file digests, adverts for discovery, and processes under a shim."""
