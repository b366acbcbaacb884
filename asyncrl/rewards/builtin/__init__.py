"""The built-in rewards."""
