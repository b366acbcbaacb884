"""`asyncrl board`: a page over the runs of a folder, served on the loopback interface."""
