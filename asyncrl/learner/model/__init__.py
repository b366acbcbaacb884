"""Models under training: loading, packed rows, log-probs, and DeepSpeed."""
