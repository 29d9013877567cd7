"""Files that survive a power cut: the one atomic write, and what has the disk keep files and folders. Imports nothing
of ours."""
