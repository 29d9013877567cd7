"""`trainctl doctor`: finds problems of a cluster's machines and suggests fixes. Imports protocol only."""
