"""Files, processes and other helpers that know nothing of training."""
