"""What the replay queue measures of a run, and the trace."""
