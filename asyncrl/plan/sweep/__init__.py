"""`asyncrl sweep`."""
