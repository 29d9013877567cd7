"""`trainctl report` and `trainctl diff`: a run's facts from its record, as one page, and how two runs differ. Imports
screens and the layers below it; pure except for `read_facts` and `run_side`."""
