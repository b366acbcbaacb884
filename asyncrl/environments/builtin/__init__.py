"""The environments that asyncrl comes with."""
