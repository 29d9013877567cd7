"""Facts of this machine: hardware, installation, file digests, and adverts for discovery."""
