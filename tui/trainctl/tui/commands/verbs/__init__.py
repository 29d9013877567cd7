"""One file a verb, with its description for people: dialog, preview, precheck, undo and key. Pure; a file that is added
here is found by itself."""
