"""Diagnosis: why a run is slow or stuck, from what its agent or its record knows. Pure, and standard library only.

`facts_of_record` reads a record's newest steps, events and readings as `RunFacts`; an agent adds what only it knows.
`diagnose` asks each rule of `rules/` in order. A rule is a row of data: the cause, what it explains, the function that
checks it and its remedies. A reading that is missing is None or absent, never 0, and its rule answers "unknown".
"""
