"""Diagnosis: why a run is slow or stuck, from facts of a live run or of its record. Pure, but for the record's reader.

`facts_of_record` reads a record's newest facts as `DiagnosisFacts`; an agent adds what only it knows.
`diagnose` asks each rule of `rules/` in order. A rule is a row of data: the cause, what it explains, the function that
checks it and its remedies. A reading that is missing is None or absent, never 0, and its rule answers "unknown".
"""
