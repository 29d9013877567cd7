"""`trainctl bench`: short real runs, one for each of some settings, and what each measured. Imports demo."""
