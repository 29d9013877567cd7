"""One file per verb, with its dialog, preview, precheck, undo and key. Pure; new files are found automatically."""
