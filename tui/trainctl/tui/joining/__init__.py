"""`trainctl cluster add`: another machine is given the program, keys and the cluster's nodes over SSH, and tried."""
